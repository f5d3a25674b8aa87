(* The bucket assigner of knownddp/buckets.py, for every list of items and every list of limits.

   [assign] mirrors the Python line by line; [greedy] is what it should amount to for the items of one key. *)
Require Import List Permutation Sorted Arith Lia NArith Bool.
Import ListNotations.

Record item := Item { idx : nat; bytes : N; key : nat; sparse : bool }.
Record bucket := Bucket { items : list item; cap : N }.
Record state := State { closed : list bucket; opened : list (nat * bucket); stage : nat -> nat }.

Definition total (l : list item) : N := fold_right (fun x s => (bytes x + s)%N) 0%N l.
Definition limit (ls : list N) (n : nat) : N := nth n ls 0%N.
Definition next (ls : list N) (n : nat) : nat := Nat.min (S n) (length ls - 1).

(* A Python dictionary: keys in the order in which they came, those deleted forgotten. *)
Fixpoint get (k : nat) (o : list (nat * bucket)) : option bucket :=
  match o with [] => None | (j, b) :: o' => if Nat.eqb k j then Some b else get k o' end.
Fixpoint put (k : nat) (b : bucket) (o : list (nat * bucket)) : list (nat * bucket) :=
  match o with [] => [(k, b)] | (j, c) :: o' => if Nat.eqb k j then (k, b) :: o' else (j, c) :: put k b o' end.
Fixpoint del (k : nat) (o : list (nat * bucket)) : list (nat * bucket) :=
  match o with [] => [] | (j, b) :: o' => if Nat.eqb k j then o' else (j, b) :: del k o' end.

Definition filling (ls : list N) (s : state) (k : nat) : bucket :=
  match get k (opened s) with Some b => b | None => Bucket [] (limit ls (stage s k)) end.
Definition joined (b : bucket) (x : item) : bucket := Bucket (items b ++ [x]) (cap b).
Definition is_full (b : bucket) : bool := N.leb (cap b) (total (items b)).
Definition feed (ls : list N) (s : state) (x : item) : state :=
  if sparse x then State (closed s ++ [Bucket [x] 0%N]) (opened s) (stage s)
  else
    let k := key x in
    let b := joined (filling ls s k) x in
    if is_full b
    then State (closed s ++ [b]) (del k (opened s)) (fun j => if Nat.eqb j k then next ls (stage s k) else stage s j)
    else State (closed s) (put k b (opened s)) (stage s).
Definition start : state := State [] [] (fun _ => 0).
Definition run (ls : list N) (xs : list item) : state := fold_left (feed ls) xs start.
Definition results (s : state) : list bucket := closed s ++ map snd (opened s).
Definition assign (ls : list N) (xs : list item) : list bucket := results (run ls xs).

Definition flat (l : list bucket) : list item := concat (map items l).
Definition dense_of (k : nat) (x : item) : bool := negb (sparse x) && Nat.eqb (key x) k.
(* The buckets that begin with a dense item of key k, and those that begin with a sparse one. *)
Definition begins (p : item -> bool) (b : bucket) : bool := match items b with [] => false | x :: _ => p x end.
Definition of_key (k : nat) (l : list bucket) : list bucket := filter (begins (dense_of k)) l.
Definition of_sparse (l : list bucket) : list bucket := filter (begins sparse) l.

(* What the assigner amounts to, one key at a time: fill until the limit in force is reached, then on to the next. *)
Fixpoint greedy (ls : list N) (n : nat) (open : list item) (xs : list item) : list bucket :=
  match xs with
  | [] => match open with [] => [] | _ => [Bucket open (limit ls n)] end
  | x :: r =>
      let b := Bucket (open ++ [x]) (limit ls n) in
      if is_full b then b :: greedy ls (next ls n) [] r else greedy ls n (open ++ [x]) r
  end.

(* -- dictionaries *)

Lemma get_put k j b o : get j (put k b o) = if Nat.eqb j k then Some b else get j o.
Proof.
  induction o as [|[i c] o IH]; simpl; [auto|].
  destruct (Nat.eqb_spec k i); simpl.
  - subst. destruct (Nat.eqb_spec j i); auto.
  - rewrite IH. destruct (Nat.eqb_spec j i), (Nat.eqb_spec j k); subst; auto; contradiction.
Qed.
Lemma get_none k o : ~ In k (map fst o) -> get k o = None.
Proof.
  induction o as [|[i c] o IH]; simpl; intros H; auto. destruct (Nat.eqb_spec k i); [subst; tauto|apply IH; tauto].
Qed.
Lemma get_in k b o : get k o = Some b -> In (k, b) o.
Proof.
  induction o as [|[i c] o IH]; simpl; intros H; [discriminate|].
  destruct (Nat.eqb_spec k i); [inversion H; subst; auto|auto].
Qed.
Lemma in_get k b o : NoDup (map fst o) -> In (k, b) o -> get k o = Some b.
Proof.
  induction o as [|[i c] o IH]; simpl; intros N H; [tauto|]. inversion N; subst.
  destruct H as [E|H]; [inversion E; subst; rewrite Nat.eqb_refl; auto|].
  destruct (Nat.eqb_spec k i); [subst; exfalso; apply H2; apply in_map_iff; exists (i, b); auto|auto].
Qed.
Lemma put_keys k b o j : In j (map fst (put k b o)) -> j = k \/ In j (map fst o).
Proof.
  induction o as [|[i c] o IH]; simpl; intros H; [intuition|].
  destruct (Nat.eqb_spec k i); simpl in *; [subst; intuition|]. destruct H; [auto|]. destruct (IH H); auto.
Qed.
Lemma put_nodup k b o : NoDup (map fst o) -> NoDup (map fst (put k b o)).
Proof.
  induction o as [|[i c] o IH]; simpl; intros H; [repeat constructor; auto|].
  inversion H; subst. destruct (Nat.eqb_spec k i); simpl; [subst; auto|].
  constructor; [intro C; apply put_keys in C; intuition|auto].
Qed.
Lemma del_in k o e : In e (del k o) -> In e o.
Proof. induction o as [|[i c] o IH]; simpl; [auto|]. destruct (Nat.eqb k i); simpl; intuition. Qed.
Lemma del_nodup k o : NoDup (map fst o) -> NoDup (map fst (del k o)) /\ ~ In k (map fst (del k o)).
Proof.
  induction o as [|[i c] o IH]; simpl; intros H; [split; auto; constructor|].
  inversion H; subst. destruct (Nat.eqb_spec k i); simpl; [subst; auto|].
  destruct (IH H3). split; [constructor; auto|intuition].
  intro C. apply H2. apply in_map_iff in C as [e [E I]]. apply del_in in I. subst. apply in_map; auto.
Qed.
Lemma get_del k j o : NoDup (map fst o) -> get j (del k o) = if Nat.eqb j k then None else get j o.
Proof.
  induction o as [|[i c] o IH]; simpl; intros N; [destruct (Nat.eqb j k); auto|]. inversion N; subst.
  destruct (Nat.eqb_spec k i); simpl.
  - subst. destruct (Nat.eqb_spec j i); [subst; apply get_none; auto|auto].
  - rewrite IH by auto. destruct (Nat.eqb_spec j i), (Nat.eqb_spec j k); subst; auto; contradiction.
Qed.
Lemma put_in k b o e : In e (put k b o) -> e = (k, b) \/ (In e o /\ (NoDup (map fst o) -> fst e <> k)).
Proof.
  induction o as [|[i c] o IH]; simpl; intros H; [intuition|].
  destruct (Nat.eqb_spec k i); simpl in *.
  - subst. destruct H as [H|H]; [auto|]. right. split; [auto|]. intros N E. inversion N; subst. apply H2, in_map; auto.
  - destruct H as [H|H]; [subst; right; split; [auto|]; intros; simpl; auto|].
    destruct (IH H) as [E|[I D]]; [auto|]. right. split; [auto|]. intros N. inversion N; auto.
Qed.

(* -- what holds of every state *)

Record sound (ls : list N) (s : state) : Prop := {
  s_nodup : NoDup (map fst (opened s));
  s_open : forall k b, In (k, b) (opened s) ->
           items b <> [] /\ Forall (fun x => dense_of k x = true) (items b) /\ cap b = limit ls (stage s k) /\
             is_full b = false;
  s_closed : Forall (fun b => items b <> []) (closed s) }.

Lemma is_dense_of x : sparse x = false -> dense_of (key x) x = true.
Proof. unfold dense_of. intros ->. simpl. apply Nat.eqb_refl. Qed.
Lemma filling_sound ls s k : sound ls s ->
  Forall (fun x => dense_of k x = true) (items (filling ls s k)) /\ cap (filling ls s k) = limit ls (stage s k).
Proof.
  intros [N O C]. unfold filling. destruct (get k (opened s)) eqn:G; [|split; simpl; auto].
  destruct (O _ _ (get_in _ _ _ G)) as [_ [H [L _]]]. auto.
Qed.
Lemma feed_sound ls s x : sound ls s -> sound ls (feed ls s x).
Proof.
  intros S. pose proof (filling_sound ls s (key x) S) as [H L]. destruct S as [N O C]. unfold feed.
  destruct (sparse x) eqn:Sx; [split; simpl; auto; apply Forall_app; split; auto; constructor; auto; discriminate|].
  assert (NE : items (joined (filling ls s (key x)) x) <> []).
  { unfold joined; simpl. destruct (items (filling ls s (key x))); discriminate. }
  destruct (is_full (joined (filling ls s (key x)) x)) eqn:F.
  - destruct (del_nodup (key x) _ N) as [N' NI]. split; simpl; auto.
    + intros k b I. assert (k <> key x) by (intro; subst; apply NI; apply in_map_iff; exists (key x, b); auto).
      destruct (Nat.eqb_spec k (key x)); [contradiction|]. apply O, del_in with (k := key x); auto.
    + apply Forall_app; split; auto.
  - split; simpl; auto using put_nodup.
    intros k b I. destruct (put_in _ _ _ _ I) as [E|[I' D]]; [|apply O; auto].
    inversion E; subst. split; [auto|]. split; [|auto].
    simpl. apply Forall_app; split; auto using is_dense_of.
Qed.
Lemma start_sound ls : sound ls start.
Proof. split; simpl; [constructor|tauto|constructor]. Qed.
Lemma fold_sound ls xs : forall s, sound ls s -> sound ls (fold_left (feed ls) xs s).
Proof. induction xs; simpl; intros; auto using feed_sound. Qed.
Lemma run_sound ls xs : sound ls (run ls xs).
Proof. apply fold_sound, start_sound. Qed.

(* -- A1: every item is in exactly one bucket *)

Definition oflat (o : list (nat * bucket)) : list item := flat (map snd o).
Lemma flat_app a b : flat (a ++ b) = flat a ++ flat b.
Proof. unfold flat. rewrite map_app, concat_app. auto. Qed.
Lemma put_perm k d x o : items d = [] ->
  Permutation (oflat (put k (joined (match get k o with Some b => b | None => d end) x) o)) (x :: oflat o).
Proof.
  intros D. unfold oflat, flat. induction o as [|[i c] o IH]; simpl; [rewrite D; auto|].
  destruct (Nat.eqb k i); simpl.
  - rewrite <- app_assoc; simpl. symmetry; apply Permutation_middle.
  - rewrite IH. symmetry; apply Permutation_middle.
Qed.
Lemma del_perm k d o : items d = [] ->
  Permutation (items (match get k o with Some b => b | None => d end) ++ oflat (del k o)) (oflat o).
Proof.
  intros D. unfold oflat, flat. induction o as [|[i c] o IH]; simpl; [rewrite D; auto|].
  destruct (Nat.eqb k i); simpl; auto. rewrite Permutation_app_swap_app, IH; auto.
Qed.
Lemma feed_perm ls s x : Permutation (flat (results (feed ls s x))) (flat (results s) ++ [x]).
Proof.
  unfold results. rewrite <- Permutation_cons_append. rewrite !flat_app.
  pose proof (put_perm (key x) (Bucket [] (limit ls (stage s (key x)))) x (opened s) eq_refl) as PP.
  pose proof (del_perm (key x) (Bucket [] (limit ls (stage s (key x)))) (opened s) eq_refl) as PD.
  change (match get (key x) (opened s) with Some b => b | None => Bucket [] (limit ls (stage s (key x))) end)
    with (filling ls s (key x)) in PP, PD. unfold oflat in PP, PD.
  unfold feed. destruct (sparse x) eqn:Sx; [|destruct (is_full _) eqn:F]; simpl; rewrite ?flat_app.
  - unfold flat at 2. simpl. rewrite <- app_assoc. simpl. symmetry. apply Permutation_middle.
  - unfold flat at 2. simpl. rewrite app_nil_r, <- PD, <- !app_assoc. simpl. rewrite <- !Permutation_middle. auto.
  - rewrite PP. symmetry. apply Permutation_middle.
Qed.
Theorem partition ls xs : Permutation (flat (assign ls xs)) xs.
Proof.
  unfold assign, run. induction xs as [|x xs IH] using rev_ind; [auto|].
  rewrite fold_left_app. simpl. rewrite feed_perm. apply Permutation_app_tail, IH.
Qed.

(* -- the keys do not touch each other *)

Lemma begins_joined p b x : Forall (fun y => p y = true) (items b) -> p x = true -> begins p (joined b x) = true.
Proof. unfold begins, joined. simpl. destruct (items b); simpl; auto. intros F _. inversion F; auto. Qed.
Lemma dense_of_other j k x : dense_of k x = true -> j <> k -> dense_of j x = false.
Proof.
  unfold dense_of. destruct (sparse x); simpl; [discriminate|]. intros E N. apply Nat.eqb_eq in E.
  apply Nat.eqb_neq. intros F. apply N. rewrite <- E. auto.
Qed.
Lemma begins_all p b : items b <> [] -> Forall (fun y => p y = true) (items b) -> begins p b = true.
Proof. unfold begins. destruct (items b); [contradiction|]. intros _ F. inversion F; auto. Qed.
Lemma begins_none p b : Forall (fun y => p y = false) (items b) -> begins p b = false.
Proof. unfold begins. destruct (items b); auto. intros F. inversion F; auto. Qed.
Lemma opened_of_key ls s k : sound ls s ->
  of_key k (map snd (opened s)) = match get k (opened s) with Some b => [b] | None => [] end.
Proof.
  intros [N O _]. induction (opened s) as [|[i c] o IH]; simpl; auto.
  inversion N; subst. destruct (O i c (or_introl eq_refl)) as [NE [H _]].
  assert (T : of_key k (map snd o) = match get k o with Some b => [b] | None => [] end) by (apply IH; auto; intros;
    apply O; simpl; auto).
  destruct (Nat.eqb_spec k i).
  - subst. rewrite (begins_all _ _ NE H). rewrite T, get_none by auto. auto.
  - rewrite (begins_none (dense_of k) c); [apply T|]. eapply Forall_impl; [|apply H].
    simpl. intros; eapply dense_of_other; eauto.
Qed.
Definition open_items (s : state) (k : nat) :
  list item := match get k (opened s) with Some b => items b | None => [] end.
Lemma filling_is ls s k : sound ls s -> filling ls s k = Bucket (open_items s k) (limit ls (stage s k)).
Proof.
  intros S. pose proof (filling_sound ls s k S) as [_ L]. unfold filling, open_items in *.
  destruct (get k (opened s)); [destruct b; simpl in *; subst; auto|auto].
Qed.
Lemma of_key_app k a b : of_key k (a ++ b) = of_key k a ++ of_key k b.
Proof. unfold of_key. apply filter_app. Qed.
Lemma independent ls k xs : forall s, sound ls s ->
  of_key k (results (fold_left (feed ls) xs s))
  = of_key k (closed s) ++ greedy ls (stage s k) (open_items s k) (filter (dense_of k) xs).
Proof.
  induction xs as [|x xs IH]; intros s S; simpl.
  - unfold results. rewrite of_key_app. rewrite (opened_of_key ls s k S). f_equal.
    unfold open_items. destruct (get k (opened s)) as [b|] eqn:G; auto.
    destruct S as [_ O _]. destruct (O _ _ (get_in _ _ _ G)) as [NE [_ [L _]]].
    destruct b as [it c]; simpl in *. subst. destruct it; [contradiction|auto].
  - rewrite IH by (apply feed_sound; auto).
    pose proof (filling_is ls s (key x) S) as FI. pose proof (filling_sound ls s (key x) S) as [FH _].
    unfold feed. destruct (sparse x) eqn:Sx.
    + assert (D : dense_of k x = false) by (unfold dense_of; rewrite Sx; auto). rewrite D. simpl.
      rewrite of_key_app. simpl. unfold begins. simpl. rewrite D, app_nil_r. auto.
    + pose proof (is_dense_of x Sx) as DX. destruct (Nat.eq_dec k (key x)) as [E|NE].
      * subst. rewrite DX. simpl. rewrite FI. unfold joined. simpl.
        destruct (is_full _) eqn:F; simpl.
        { rewrite of_key_app. simpl. rewrite FI in FH. simpl in FH.
          pose proof (begins_joined (dense_of (key x)) (Bucket (open_items s (key x)) (limit ls (stage s (key x)))) x
            FH DX) as B.
          unfold joined in B. simpl in B. rewrite B.
          rewrite Nat.eqb_refl, <- app_assoc. simpl. unfold open_items at 2. simpl. rewrite get_del by apply S.
            rewrite Nat.eqb_refl. auto. }
        { f_equal. unfold open_items at 1. simpl. rewrite get_put, Nat.eqb_refl. auto. }
      * assert (D : dense_of k x = false) by (eapply dense_of_other; eauto). rewrite D.
        assert (B : begins (dense_of k) (joined (filling ls s (key x)) x) = false).
        { apply begins_none. simpl. apply Forall_app; split; auto.
          eapply Forall_impl; [|apply FH]. simpl; intros; eapply dense_of_other; eauto. }
        destruct (is_full _) eqn:F; simpl.
        { rewrite of_key_app. simpl. rewrite B, app_nil_r. destruct (Nat.eqb_spec k (key x)); [contradiction|].
          f_equal. f_equal. unfold open_items. simpl. rewrite get_del by apply S.
          destruct (Nat.eqb_spec k (key x)); [contradiction|auto]. }
        { f_equal. f_equal. unfold open_items. simpl. rewrite get_put.
          destruct (Nat.eqb_spec k (key x)); [contradiction|auto]. }
Qed.
(* A2: the buckets of a key are those that its items alone would get: keys share neither buckets nor limits. *)
Theorem keys_are_independent ls k xs : of_key k (assign ls xs) = greedy ls 0 [] (filter (dense_of k) xs).
Proof. unfold assign, run. rewrite independent by apply start_sound. auto. Qed.

(* A3: a sparse item is a bucket of its own, without a limit, in the order of the items. *)
Lemma opened_not_sparse ls s : sound ls s -> of_sparse (map snd (opened s)) = [].
Proof.
  intros [_ O _]. induction (opened s) as [|[i c] o IH]; simpl; auto.
  destruct (O i c (or_introl eq_refl)) as [_ [H _]]. rewrite (begins_none sparse c).
  - apply IH. intros. apply O. simpl; auto.
  - eapply Forall_impl; [|apply H]. simpl. unfold dense_of. intros y. destruct (sparse y); auto.
Qed.
Theorem sparse_alone ls xs : of_sparse (assign ls xs) = map (fun x => Bucket [x] 0%N) (filter sparse xs).
Proof.
  assert (G : forall s, sound ls s -> of_sparse (results (fold_left (feed ls) xs s))
                      = of_sparse (closed s) ++ map (fun x => Bucket [x] 0%N) (filter sparse xs)).
  { induction xs as [|x r IH]; intros s S; simpl.
    - unfold results, of_sparse. rewrite filter_app. fold (of_sparse (map snd (opened s))).
      rewrite (opened_not_sparse ls) by auto. auto.
    - rewrite IH by (apply feed_sound; auto). unfold feed. destruct (sparse x) eqn:Sx; simpl.
      + unfold of_sparse. rewrite filter_app. simpl. unfold begins. simpl. rewrite Sx, <- app_assoc. auto.
      + assert (B : begins sparse (joined (filling ls s (key x)) x) = false).
        { apply begins_none. simpl. apply Forall_app; split; [|auto].
          eapply Forall_impl; [|apply (filling_sound ls s (key x) S)]. simpl. unfold dense_of. intros y.
            destruct (sparse y); auto. }
        destruct (is_full _); simpl; auto. unfold of_sparse. rewrite filter_app. simpl. rewrite B, app_nil_r. auto. }
  unfold assign, run. rewrite G by apply start_sound. auto.
Qed.
(* ... and nothing else is a bucket: each begins with a sparse item, or with a dense one of some key. *)
Theorem no_other_bucket ls xs b : In b (assign ls xs) ->
  In b (of_sparse (assign ls xs)) \/ exists k, In b (of_key k (assign ls xs)).
Proof.
  intros I. pose proof (run_sound ls xs) as [_ O C].
  assert (NE : items b <> []).
  { unfold assign, results in I. apply in_app_or in I as [I|I]; [rewrite Forall_forall in C; auto|].
    apply in_map_iff in I as [[k c] [E I]]. simpl in E. subst. apply (O _ _ I). }
  unfold of_sparse, of_key. destruct (items b) as [|x r] eqn:E; [contradiction|].
  destruct (sparse x) eqn:Sx; [left|right; exists (key x)]; apply filter_In; split; auto; unfold begins; rewrite E;
    auto using is_dense_of.
Qed.

(* -- what the buckets of one key look like *)

(* A4: their items, bucket after bucket, are the key's dense items in the order in which they came. *)
Lemma greedy_flat ls xs : forall n o, flat (greedy ls n o xs) = o ++ xs.
Proof.
  unfold flat. induction xs as [|x r IH]; intros n o; simpl.
  - destruct o; simpl; rewrite ?app_nil_r; auto.
  - destruct (is_full _); simpl; rewrite IH; simpl; rewrite <- app_assoc; auto.
Qed.
Theorem order_kept ls k xs : flat (of_key k (assign ls xs)) = filter (dense_of k) xs.
Proof. rewrite keys_are_independent, greedy_flat. auto. Qed.

(* A5: the n-th bucket of a key has the n-th limit; the last limit repeats. *)
Fixpoint stages (ls : list N) (n count : nat) : list N :=
  match count with 0 => [] | S c => limit ls n :: stages ls (next ls n) c end.
Lemma greedy_caps ls xs : forall n o, map cap (greedy ls n o xs) = stages ls n (length (greedy ls n o xs)).
Proof.
  induction xs as [|x r IH]; intros n o; simpl; [destruct o; auto|].
  destruct (is_full _); simpl; [rewrite <- IH|]; auto.
Qed.
Lemma stages_nth ls c : forall n j, j < c -> n <= length ls - 1 ->
  nth j (stages ls n c) 0%N = nth (Nat.min (n + j) (length ls - 1)) ls 0%N.
Proof.
  induction c as [|c IH]; intros n j L B; [lia|]. destruct j; simpl.
  - unfold limit. f_equal. lia.
  - rewrite IH by (unfold next; lia). f_equal. unfold next. lia.
Qed.
Theorem limit_in_force ls k xs j : j < length (of_key k (assign ls xs)) ->
  nth j (map cap (of_key k (assign ls xs))) 0%N = nth (Nat.min j (length ls - 1)) ls 0%N.
Proof. rewrite keys_are_independent. intros L. rewrite greedy_caps, stages_nth by (auto; lia). auto. Qed.

(* A6: each bucket of a key but the last reaches its limit, none reaches it before its last item: what lies above the
   limit is less than that item. *)
Definition reaches (b : bucket) : Prop := (cap b <= total (items b))%N.
Definition below_before_last (b : bucket) : Prop := exists p x, items b = p ++ [x] /\ (p = [] \/ (total p < cap b)%N).
Lemma total_app a b : total (a ++ b) = (total a + total b)%N.
Proof. induction a; simpl; [auto|]. rewrite IHa. lia. Qed.
Lemma greedy_good ls xs : forall n o, (o = [] \/ (total o < limit ls n)%N) ->
  Forall below_before_last (greedy ls n o xs) /\ Forall reaches (removelast (greedy ls n o xs)).
Proof.
  induction xs as [|x r IH]; intros n o H; simpl.
  - destruct o as [|y o]; simpl; split; constructor; auto.
    destruct (@exists_last _ (y :: o)) as [p [z E]]; [discriminate|]. exists p, z. simpl. split; auto.
    destruct H as [H|H]; [discriminate|]. right. rewrite E, total_app in H. lia.
  - destruct (is_full _) eqn:F; unfold is_full in F; simpl in F.
    + destruct (IH (next ls n) []) as [A B]; [auto|]. split.
      * constructor; auto. exists o, x. auto.
      * destruct (greedy ls (next ls n) [] r); [constructor|]. constructor; auto.
        unfold reaches; simpl. apply N.leb_le in F. auto.
    + apply N.leb_gt in F. apply IH. auto.
Qed.
Theorem overshoot ls k xs :
  Forall below_before_last (of_key k (assign ls xs)) /\ Forall reaches (removelast (of_key k (assign ls xs))).
Proof. rewrite keys_are_independent. apply greedy_good. auto. Qed.

(* A7: with no limit below m, the B bytes of a key make at most B / m + 1 buckets. *)
Lemma limit_least ls m n : ls <> [] -> Forall (fun l => (m <= l)%N) ls -> n <= length ls - 1 -> (m <= limit ls n)%N.
Proof.
  intros NE F L. unfold limit. rewrite Forall_forall in F. apply F, nth_In.
    destruct ls; [contradiction|simpl in *; lia].
Qed.
Lemma greedy_count ls m xs : ls <> [] -> Forall (fun l => (m <= l)%N) ls -> forall n o, n <= length ls - 1 ->
  (m * N.of_nat (length (greedy ls n o xs)) <= total o + total xs + m)%N.
Proof.
  intros NE F. induction xs as [|x r IH]; intros n o L; simpl.
  - destruct o; simpl; nia.
  - destruct (is_full _) eqn:Fu.
    + unfold is_full in Fu. simpl in Fu. apply N.leb_le in Fu. rewrite total_app in Fu. simpl in Fu.
      pose proof (limit_least ls m n NE F L).
      assert (N1 : next ls n <= length ls - 1) by (unfold next; lia).
      specialize (IH (next ls n) [] N1). simpl in *. lia.
    + specialize (IH n (o ++ [x]) L). rewrite total_app in IH. simpl in IH. lia.
Qed.
Theorem number_of_buckets ls m k xs : ls <> [] -> Forall (fun l => (m <= l)%N) ls ->
  (m * N.of_nat (length (of_key k (assign ls xs))) <= total (filter (dense_of k) xs) + m)%N.
Proof. intros. rewrite keys_are_independent. apply (greedy_count ls m _ H H0 0 []). lia. Qed.
