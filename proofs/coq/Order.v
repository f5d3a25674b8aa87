(* The order of buckets, the planner, and what may not be promised of the assigner. *)
Require Import List Permutation Sorted Arith Lia NArith Bool.
Require Import Assign.
Import ListNotations.

(* -- the order of the buckets *)

Definition first (b : bucket) : nat := match items b with [] => 0 | x :: _ => idx x end.
Definition final (b : bucket) : nat := last (map idx (items b)) 0.
Lemma sorted_snoc l x : StronglySorted lt l -> Forall (fun y => y < x) l -> StronglySorted lt (l ++ [x]).
Proof.
  induction l; simpl; intros S F; [repeat constructor|].
  inversion S; inversion F; subst. constructor; auto. apply Forall_app; auto.
Qed.
Lemma sorted_split l x : StronglySorted lt (l ++ [x]) -> StronglySorted lt l /\ Forall (fun y => y < x) l.
Proof.
  induction l; simpl; intros S; [split; constructor|]. inversion S; subst. destruct (IHl H1).
  apply Forall_app in H2 as [H2 H3]. inversion H3; subst. split; constructor; auto.
Qed.
Lemma final_joined b x : final (joined b x) = idx x.
Proof. unfold final, joined. simpl. rewrite map_app. simpl. apply last_last. Qed.
Lemma first_joined b x : items b <> [] -> first (joined b x) = first b.
Proof. unfold first, joined. simpl. destruct (items b); [contradiction|auto]. Qed.
Lemma put_firsts k d x o : items d = [] -> (forall b, In b (map snd o) -> items b <> []) ->
  map first (map snd (put k (joined (match get k o with Some b => b | None => d end) x) o))
  = map first (map snd o) ++ (match get k o with Some _ => [] | None => [idx x] end).
Proof.
  intros D NE. induction o as [|[i c] o IH]; simpl.
  - unfold first, joined. simpl. rewrite D. auto.
  - destruct (Nat.eqb k i); simpl; [rewrite first_joined, app_nil_r by (apply NE; simpl; auto); auto|].
    rewrite IH by (intros; apply NE; simpl; auto). auto.
Qed.
Lemma del_firsts k o : StronglySorted lt (map first (map snd o)) -> StronglySorted lt (map first (map snd (del k o))).
Proof.
  assert (G : forall P o, Forall P (map first (map snd o)) -> Forall P (map first (map snd (del k o)))).
  { clear o. intros P o. induction o as [|[i c] o IH]; simpl; intros F; auto. inversion F; subst.
    destruct (Nat.eqb k i); simpl; auto. }
  induction o as [|[i c] o IH]; simpl; intros S; auto. inversion S; subst.
  destruct (Nat.eqb k i); simpl; auto. constructor; auto.
Qed.
Lemma order_inv ls xs : StronglySorted lt (map idx xs) ->
  let s := run ls xs in
  StronglySorted lt (map final (closed s)) /\ StronglySorted lt (map first (map snd (opened s))).
Proof.
  unfold run. induction xs as [|x xs IH] using rev_ind; intros S; simpl; [split; constructor|].
  rewrite map_app in S. simpl in S. apply sorted_split in S as [S F]. specialize (IH S). simpl in IH.
  rewrite fold_left_app. simpl. fold (run ls xs) in *. destruct IH as [IC IO].
  pose proof (run_sound ls xs) as SO. pose proof (partition ls xs) as P.
  assert (U : forall y, In y xs -> idx y < idx x) by (intros; rewrite Forall_forall in F; apply F, in_map; auto).
  assert (FL : forall b, In b (assign ls xs) -> items b <> [] -> first b < idx x /\ final b < idx x).
  { intros b I NE. assert (V : forall y, In y (items b) -> idx y < idx x).
    { intros y Y. apply U. eapply Permutation_in; [apply P|]. unfold flat. apply in_concat. exists (items b).
      split; auto. apply in_map; auto. }
    split; [unfold first; destruct (items b); [contradiction|apply V; simpl; auto]|].
    unfold final. destruct (exists_last NE) as [p [z E]]. rewrite E, map_app. simpl. rewrite last_last. apply V.
      rewrite E. apply in_or_app; simpl; auto. }
  assert (NEo : forall b, In b (map snd (opened (run ls xs))) -> items b <> []).
  { intros b I. apply in_map_iff in I as [[k c] [E I]]. simpl in E. subst. destruct SO as [_ O _]. apply (O _ _ I). }
  assert (FC : Forall (fun y => y < idx x) (map final (closed (run ls xs)))).
  { apply Forall_forall. intros y Y. apply in_map_iff in Y as [b [E I]]. subst. apply FL; [apply in_or_app; auto|].
    destruct SO as [_ _ C]. rewrite Forall_forall in C. auto. }
  assert (FO : Forall (fun y => y < idx x) (map first (map snd (opened (run ls xs))))).
  { apply Forall_forall. intros y Y. apply in_map_iff in Y as [b [E I]]. subst.
    apply FL; [apply in_or_app; auto|auto]. }
  unfold feed. destruct (sparse x) eqn:Sx; [|destruct (is_full _) eqn:Fu]; simpl; split; auto.
  - rewrite map_app. apply sorted_snoc; auto.
  - rewrite map_app. simpl. rewrite final_joined. apply sorted_snoc; auto.
  - apply del_firsts; auto.
  - unfold filling. rewrite put_firsts by auto.
    destruct (get (key x) (opened (run ls xs))); [rewrite app_nil_r; auto|apply sorted_snoc; auto].
Qed.
(* A8: where the index is the position in the input: first the buckets that reached their limit, and sparse ones, in the
   order of their last items; then those that did not, at most one a key, in the order of their first. *)
Theorem launch_order ls xs : StronglySorted lt (map idx xs) -> exists done rest, assign ls xs = done ++ rest
  /\ Forall reaches done /\ StronglySorted lt (map final done)
  /\ Forall (fun b => ~ reaches b) rest /\ StronglySorted lt (map first rest)
  /\ exists keys, NoDup keys /\ Forall2 (fun k b => begins (dense_of k) b = true) keys rest.
Proof.
  intros S. destruct (order_inv ls xs S) as [C O]. pose proof (run_sound ls xs) as SO.
  exists (closed (run ls xs)), (map snd (opened (run ls xs))).
  split; [auto|]. split; [|split; [auto|split; [|split; [auto|]]]].
  - clear. unfold run. induction xs as [|x xs IH] using rev_ind; [constructor|]. rewrite fold_left_app. simpl.
    unfold feed at 1. destruct (sparse x); [|destruct (is_full _) eqn:F]; simpl; auto; apply Forall_app; split; auto;
      constructor; auto.
    + unfold reaches. simpl. lia.
    + apply N.leb_le. auto.
  - destruct SO as [_ P _]. apply Forall_forall. intros b I. apply in_map_iff in I as [[k c] [E I]]. simpl in E. subst.
    destruct (P _ _ I) as [_ [_ [_ F]]]. unfold is_full in F. apply N.leb_gt in F. unfold reaches. lia.
  - exists (map fst (opened (run ls xs))). split; [apply SO|]. destruct SO as [_ P _]. clear -P.
    induction (opened (run ls xs)) as [|[k b] o IH]; simpl; constructor; auto.
    + destruct (P k b (or_introl eq_refl)) as [NE [H _]]. simpl. apply begins_all; auto.
    + apply IH. intros. apply P. simpl. auto.
Qed.
(* ... which is no loss: the assigner never looks at an index. *)
Definition renamed (f : nat -> nat) (x : item) : item := Item (f (idx x)) (bytes x) (key x) (sparse x).
Definition renamed_bucket (f : nat -> nat) (b : bucket) : bucket := Bucket (map (renamed f) (items b)) (cap b).
Definition renamed_state (f : nat -> nat) (s : state) : state :=
  State (map (renamed_bucket f) (closed s)) (map (fun kb => (fst kb, renamed_bucket f (snd kb))) (opened s)) (stage s).
Lemma total_renamed f l : total (map (renamed f) l) = total l.
Proof. induction l; simpl; auto. rewrite IHl. auto. Qed.
Lemma get_renamed f k o :
  get k (map (fun kb => (fst kb, renamed_bucket f (snd kb))) o) = option_map (renamed_bucket f) (get k o).
Proof. induction o as [|[i c] o IH]; simpl; auto. destruct (Nat.eqb k i); auto. Qed.
Lemma put_renamed f k b o : put k (renamed_bucket f b) (map (fun kb => (fst kb, renamed_bucket f (snd kb))) o)
                          = map (fun kb => (fst kb, renamed_bucket f (snd kb))) (put k b o).
Proof. induction o as [|[i c] o IH]; simpl; auto. destruct (Nat.eqb k i); simpl; auto. rewrite IH; auto. Qed.
Lemma del_renamed f k o :
  del k (map (fun kb => (fst kb, renamed_bucket f (snd kb))) o) = map (fun kb => (fst kb,
  renamed_bucket f (snd kb))) (del k o).
Proof. induction o as [|[i c] o IH]; simpl; auto. destruct (Nat.eqb k i); simpl; auto. rewrite IH; auto. Qed.
Lemma feed_renamed f ls s x : feed ls (renamed_state f s) (renamed f x) = renamed_state f (feed ls s x).
Proof.
  unfold feed. change (sparse (renamed f x)) with (sparse x). change (key (renamed f x)) with (key x).
  destruct (sparse x); [unfold renamed_state; simpl; rewrite map_app; auto|].
  assert (J : joined (filling ls (renamed_state f s) (key x)) (renamed f x) = renamed_bucket f (joined (filling ls s
    (key x)) x)).
  { unfold filling. simpl. rewrite get_renamed.
    destruct (get (key x) (opened s)); simpl; unfold joined, renamed_bucket; simpl; rewrite ?map_app; auto. }
  assert (F : is_full (renamed_bucket f (joined (filling ls s (key x)) x)) = is_full (joined (filling ls s (key x)) x)).
  { generalize (joined (filling ls s (key x)) x). intros b. unfold is_full. simpl. rewrite total_renamed. auto. }
  cbv zeta. rewrite J, F.
    destruct (is_full (joined (filling ls s (key x)) x)); unfold renamed_state; cbn [closed opened stage].
  - rewrite del_renamed, map_app. auto.
  - rewrite put_renamed. auto.
Qed.
Theorem blind_to_indices f ls xs : assign ls (map (renamed f) xs) = map (renamed_bucket f) (assign ls xs).
Proof.
  unfold assign, run. assert (G :
    forall s, fold_left (feed ls) (map (renamed f) xs) (renamed_state f s) = renamed_state f (fold_left (feed ls) xs
    s)).
  { induction xs as [|x r IH]; simpl; intros s; auto. rewrite feed_renamed. apply IH. }
  change start with (renamed_state f start) at 1. rewrite G. unfold results, renamed_state. simpl.
  rewrite map_app, !map_map. auto.
Qed.

(* A9: what compute_bucket_assignment_by_size gives without indices is sorted by smallest index. *)
Fixpoint insert (b : bucket) (l : list bucket) : list bucket :=
  match l with [] => [b] | c :: r => if Nat.leb (first b) (first c) then b :: l else c :: insert b r end.
Definition sorted (l : list bucket) : list bucket := fold_right insert [] l.
Lemma insert_perm b l : Permutation (insert b l) (b :: l).
Proof. induction l; simpl; auto. destruct (Nat.leb _ _); auto. rewrite IHl. apply perm_swap. Qed.
Lemma insert_sorted b l : StronglySorted le (map first l) -> StronglySorted le (map first (insert b l)).
Proof.
  induction l as [|c l IH]; simpl; intros S; [repeat constructor|]. inversion S; subst.
  destruct (Nat.leb_spec (first b) (first c)); simpl.
  - constructor; auto. constructor; auto. eapply Forall_impl; [|apply H2]. simpl; intros; lia.
  - constructor; auto. rewrite (Permutation_map first (insert_perm b l)). simpl. constructor; auto. lia.
Qed.
Theorem sorted_by_smallest ls xs : StronglySorted lt (map idx xs) ->
  Permutation (sorted (assign ls xs)) (assign ls xs)
  /\ StronglySorted le (map first (sorted (assign ls xs)))
  /\ forall b x, In b (assign ls xs) -> In x (items b) -> first b <= idx x.
Proof.
  intros S. split; [|split].
  - induction (assign ls xs); simpl; auto. rewrite insert_perm, IHl; auto.
  - induction (assign ls xs); simpl; [constructor|]. apply insert_sorted; auto.
  - intros b x I X. assert (SS : forall p, StronglySorted lt (map idx (filter p xs))).
    { intros p. clear -S. induction xs as [|y r IH]; simpl; [constructor|]. inversion S; subst.
      destruct (p y); simpl; auto.
      constructor; auto. rewrite Forall_forall in *. intros z Z. apply H2. apply in_map_iff in Z as [w [E W]].
        apply filter_In in W. apply in_map_iff. exists w; intuition. }
    destruct (no_other_bucket ls xs b I) as [B|[k B]].
    + rewrite sparse_alone in B. apply in_map_iff in B as [y [E _]]. subst. simpl in X. destruct X as [X|[]]. subst.
      auto.
    + assert (T : StronglySorted lt (map idx (flat (of_key k (assign ls xs))))) by (rewrite order_kept; apply SS).
      clear -B X T. unfold flat in T. induction (of_key k (assign ls xs)) as [|c l IH]; simpl in *; [tauto|].
      rewrite map_app in T. destruct B as [B|B].
      * subst. unfold first. destruct (items b) as [|y r]; simpl in *; [tauto|]. inversion T; subst.
        destruct X as [X|X]; [subst; auto|]. rewrite Forall_forall in H2. apply Nat.lt_le_incl, H2, in_or_app. left.
          apply in_map; auto.
      * apply IH; auto. clear -T. induction (map idx (items c)); simpl in T; auto. inversion T; auto.
Qed.

(* -- the planner of knownddp/plan.py *)

(* A10: the agreed parameters, in the learnt order, those held back apart, each assigned: every agreed one is in exactly
   one bucket and no other parameter is. *)
Definition plan (ls : list N) (order : list item) (agreed held : item -> bool) : list bucket * list bucket :=
  let present := filter agreed order in
  (assign ls (filter (fun x => negb (held x)) present), assign ls (filter held present)).
Theorem plan_places_agreed ls order agreed held : let (early, late) := plan ls order agreed held in
  Permutation (flat (early ++ late)) (filter agreed order)
  /\ Forall (fun x => held x = false) (flat early) /\ Forall (fun x => held x = true) (flat late).
Proof.
  simpl. assert (F : forall P xs, Forall P xs -> Forall P (flat (assign ls xs))).
  { intros P xs. apply Permutation_Forall. symmetry. apply partition. }
  split; [rewrite flat_app, !partition|split; apply F].
  - induction (filter agreed order) as [|x r IH]; simpl; auto.
    destruct (held x); simpl; [rewrite <- Permutation_middle|]; auto.
  - apply Forall_forall. intros x I. apply filter_In in I as [_ I]. destruct (held x); auto; discriminate.
  - apply Forall_forall. intros x I. apply filter_In in I as [_ I]. auto.
Qed.

(* -- what may not be promised *)

(* Buckets under a smaller limit need not be parts of those under a larger one: of sizes 2, 1, 1 a limit of 3 makes
   [0, 1], [2], and a limit of 2 makes [0], [1, 2]. *)
Definition sizes (l : list N) : list item := map (fun p => Item (fst p) (snd p) 0 false) (combine (seq 0 (length l)) l).
Definition indices (l : list bucket) : list (list nat) := map (fun b => map idx (items b)) l.
Theorem smaller_limits_need_not_refine : ~ forall xs small large, (small <= large)%N ->
  Forall (fun s => Exists (fun b => incl s b) (indices (assign [large] xs))) (indices (assign [small] xs)).
Proof.
  intros H. assert (L : (2 <= 3)%N) by lia. specialize (H (sizes [2; 1; 1]%N) 2%N 3%N L).
  vm_compute in H. inversion H as [|? ? _ R]. inversion R as [|? ? E _]. subst.
  inversion E as [? ? I|? ? E']; subst; [specialize (I 2 ltac:(simpl; auto)); simpl in I; intuition discriminate|].
  inversion E' as [? ? I|? ? E'']; subst; [specialize (I 1 ltac:(simpl; auto)); simpl in I; intuition discriminate|].
  inversion E''.
Qed.
