(* One rank's launches in a window (knownddp/protocol.py: _start, _count, _filled, ready, end), whatever the order in
   which gradients come. *)
Require Import List Arith Lia Bool.
Import ListNotations.

Record bucket := Bucket { members : list nat; held : bool }.
Record state := State { next : nat; pending : list nat; fired : list nat }.
Definition has (l : list nat) (p : nat) : bool := existsb (Nat.eqb p) l.

Section Window.
Variable plan : list bucket.
Variable expected : nat -> bool.   (* by this rank; others may expect something else *)
Variable waits : bool.             (* everything is launched at the end *)

Fixpoint place (p : nat) (l : list bucket) : option nat :=
  match l with [] => None | b :: r => if has (members b) p then Some 0 else option_map S (place p r) end.
Fixpoint lowered (k : nat) (l : list nat) : list nat :=
  match l, k with [], _ => [] | n :: r, 0 => n - 1 :: r | n :: r, S j => n :: lowered j r end.
(* How many buckets in a row, from the first, may go. *)
Fixpoint may_go (bs : list bucket) (ps : list nat) : nat :=
  match bs, ps with b :: bs', p :: ps' => if Nat.eqb p 0 && negb (held b) then S (may_go bs' ps') else 0 | _,
    _ => 0 end.
Definition at_start : state := State 0 (map (fun b => length (filter expected (members b))) plan) [].
Definition advance (s : state) : state :=
  if waits then s else State (next s + may_go (skipn (next s) plan) (skipn (next s) (pending s))) (pending s) (fired s).
Definition count (s : state) (p : nat) : state * option nat :=
  let gone := State (next s) (pending s) (p :: fired s) in
  match place p plan with
  | None => (gone, None)
  | Some k =>
      if Nat.ltb k (next s) then (gone, None)
      else if negb (has (fired s) p) && expected p then
        let left := lowered k (pending s) in
        (State (next s) left (p :: fired s), if Nat.eqb (nth k left 0) 0 then Some k else None)
      else (gone, None)
  end.
Definition ready (s : state) (p : nat) : state :=
  let (t, filled) := count s p in
  match filled with Some k => if Nat.eqb k (next t) then advance t else t | None => t end.
(* Gradients that came before the agreed set was known, then those after. *)
Definition opened (early : list nat) : state := advance (fold_left (fun s p => fst (count s p)) early at_start).
Definition through (early later : list nat) : state := fold_left ready later (opened early).

(* What should have been launched once the gradients in G have come: the buckets of the plan, from the first, until one
   that is held or lacks a gradient that is expected here. *)
Definition missing (G : list nat) (b : bucket) :
  nat := length (filter (fun p => expected p && negb (has G p)) (members b)).
Definition due (G : list nat) : nat := if waits then 0 else may_go plan (map (missing G) plan).

Hypothesis apart : NoDup (concat (map members plan)).    (* A10 of Order.v: a parameter is in one bucket at most *)

Lemma has_in l p : has l p = true <-> In p l.
Proof.
  unfold has. rewrite existsb_exists. split; [intros [x [I E]]; apply Nat.eqb_eq in E; subst; auto|].
  intros I. exists p. rewrite Nat.eqb_refl. auto.
Qed.
Lemma has_cons l p q : has (p :: l) q = Nat.eqb q p || has l q.
Proof. auto. Qed.
Arguments has : simpl never.
Lemma missing_none G p b : has (members b) p = false -> missing (p :: G) b = missing G b.
Proof.
  intros N. unfold missing. f_equal. apply filter_ext_in. intros q I. rewrite has_cons.
  destruct (Nat.eqb_spec q p); auto. subst. apply has_in in I. congruence.
Qed.
Lemma missing_same G p b : has G p = true \/ expected p = false -> missing (p :: G) b = missing G b.
Proof.
  intros H. unfold missing. f_equal. apply filter_ext. intros q. rewrite has_cons.
  destruct (Nat.eqb_spec q p); auto. subst. destruct H as [->| ->]; simpl; rewrite ?andb_false_r; auto.
Qed.
Lemma missing_one G p b : NoDup (members b) -> has (members b) p = true -> has G p = false -> expected p = true ->
  missing (p :: G) b = missing G b - 1.
Proof.
  intros N I F X. unfold missing. rewrite has_in in I. induction (members b) as [|q r IH]; [tauto|]. inversion N; subst.
  simpl. rewrite has_cons. destruct (Nat.eqb_spec q p).
  - subst. rewrite X, F. simpl. rewrite Nat.sub_0_r. f_equal. apply filter_ext_in. intros x J. rewrite has_cons.
    destruct (Nat.eqb_spec x p); auto. subst. contradiction.
  - destruct I as [I|I]; [contradiction|]. specialize (IH H2 I). simpl.
    destruct (expected q && negb (has G q)); simpl; [|auto]. rewrite IH.
    assert (In p (filter (fun p0 => expected p0 && negb (has G p0)) r)) by (apply filter_In; rewrite X, F; auto).
    destruct (filter (fun p0 => expected p0 && negb (has G p0)) r); simpl in *; [tauto|lia].
Qed.
Lemma lowered_missing G p : forall l k, NoDup (concat (map members l)) -> place p l = Some k ->
  has G p = false -> expected p = true -> lowered k (map (missing G) l) = map (missing (p :: G)) l.
Proof.
  induction l as [|b l IH]; simpl; intros k N P F X; [discriminate|].
  assert (A : NoDup (members b)) by (clear -N; induction (members b); [constructor|]; simpl in N; inversion N; subst;
    constructor; [intro; apply H1, in_or_app; auto|auto]).
  assert (B : NoDup (concat (map members l))) by (clear -N; induction (members b); simpl in N; auto; inversion N; auto).
  destruct (has (members b) p) eqn:I.
  - inversion P; subst. rewrite missing_one by auto. cbn [lowered]. f_equal. apply map_ext_in. intros c C. symmetry.
    apply missing_none.
    destruct (has (members c) p) eqn:D; auto. exfalso. rewrite has_in in I, D. clear -N I D C.
    induction (members b) as [|q r IHr]; [auto|]. simpl in N. inversion N; subst. destruct I as [I|I]; [|auto].
    subst. apply H1, in_or_app. right. apply in_concat. exists (members c). split; auto. apply in_map; auto.
  - destruct (place p l) as [j|] eqn:Q; [|discriminate]. inversion P; subst. cbn [lowered].
    rewrite (missing_none G p b I), <- (IH j); auto.
Qed.
Lemma place_none G p l : place p l = None -> map (missing (p :: G)) l = map (missing G) l.
Proof.
  induction l as [|b l IH]; simpl; auto. destruct (has (members b) p) eqn:I; [discriminate|].
  destruct (place p l); [discriminate|]. intros _. rewrite missing_none, IH; auto.
Qed.
Lemma place_in_range p l : forall k, place p l = Some k -> k < length l.
Proof.
  induction l as [|b l IH]; simpl; intros k P; [discriminate|]. destruct (has (members b) p); [inversion P; lia|].
  destruct (place p l) as [j|]; [|discriminate]. inversion P; subst. specialize (IH j eq_refl). lia.
Qed.
Lemma may_go_le bs : forall ps, may_go bs ps <= length bs.
Proof. induction bs; simpl; intros [|p ps]; try lia. destruct (_ && _); simpl; [specialize (IHbs ps)|]; lia. Qed.
Lemma may_go_split n : forall bs ps, n <= may_go bs ps -> may_go bs ps = n + may_go (skipn n bs) (skipn n ps).
Proof.
  induction n as [|n IH]; intros bs ps L; auto. destruct bs as [|b bs], ps as [|p ps]; simpl in *; try lia.
  destruct (_ && _); [|lia]. rewrite (IH bs ps) by lia. auto.
Qed.
(* Fewer missing, and the first n as before: at least as many may go. *)
Lemma may_go_more bs : forall ps qs, length ps = length qs -> (forall k, nth k qs 0 <= nth k ps 0) ->
  may_go bs ps <= may_go bs qs.
Proof.
  induction bs as [|b bs IH]; intros [|p ps] [|q qs] L M; simpl in *; try lia.
  pose proof (M 0) as Z. simpl in Z. destruct (Nat.eqb_spec p 0), (Nat.eqb_spec q 0); simpl; try lia.
  destruct (held b); simpl; [lia|]. apply le_n_S, IH; [lia|]. intros k. apply (M (S k)).
Qed.
Lemma lowered_length k : forall l, length (lowered k l) = length l.
Proof. induction k; intros [|n l]; simpl; auto. Qed.
Lemma lowered_le k : forall l j, nth j (lowered k l) 0 <= nth j l 0.
Proof. induction k; intros [|n l] [|j]; simpl; auto; lia. Qed.
Lemma lowered_other k : forall l j, j <> k -> nth j (lowered k l) 0 = nth j l 0.
Proof. induction k; intros [|n l] [|j] N; simpl; auto; try lia. Qed.
Lemma stops bs : forall ps qs n, may_go bs ps = n -> length ps = length qs -> (forall k, k < n ->
  nth k qs 0 = nth k ps 0) ->
  (nth n qs 0 = nth n ps 0 \/ nth n qs 0 <> 0) -> may_go bs qs = n.
Proof.
  induction bs as [|b bs IH]; intros [|p ps] [|q qs] n E L S H; simpl in *; try lia.
  destruct (Nat.eqb_spec p 0); simpl in *.
  - destruct (held b) eqn:HB; simpl in *.
    + subst. destruct (Nat.eqb q 0); auto.
    + destruct n; [lia|]. pose proof (S 0 (Nat.lt_0_succ _)) as Z. simpl in Z. subst q p. simpl. f_equal.
      apply (IH ps qs n); try lia; auto. intros k K. apply (S (Datatypes.S k)). lia.
  - subst n. simpl in H. destruct (Nat.eqb_spec q 0); simpl; auto. lia.
Qed.

(* What is always so: the counters say what is missing. *)
Definition counted (s : state) (G : list nat) : Prop := pending s = map (missing G) plan /\
  (forall p, has (fired s) p = has G p).
Lemma start_counted : counted at_start [].
Proof.
  split; auto. simpl. apply map_ext. intros b. unfold missing. f_equal. apply filter_ext. intros p. simpl.
  rewrite andb_true_r. auto.
Qed.
Lemma gone_before p : forall l k n (f : bucket -> nat), place p l = Some k -> k < n -> n <= may_go l (map f l) ->
  exists b, has (members b) p = true /\ f b = 0.
Proof.
  induction l as [|b l IH]; simpl; intros k n f P K L; [discriminate|].
  destruct (Nat.eqb_spec (f b) 0) as [Z|Z]; simpl in L; [|lia].
  destruct (has (members b) p) eqn:I; [exists b; auto|]. destruct (place p l) as [j|]; [|discriminate].
    inversion P; subst.
  destruct (held b); simpl in L; [lia|]. apply (IH j (n - 1) f); auto; lia.
Qed.
Lemma nothing_missing G p b : has (members b) p = true -> missing G b = 0 -> has G p = true \/ expected p = false.
Proof.
  intros I Z. destruct (has G p) eqn:HG; auto. destruct (expected p) eqn:X; auto. exfalso.
  unfold missing in Z. apply length_zero_iff_nil in Z.
  assert (J : In p (filter (fun q => expected q && negb (has G q)) (members b))) by (apply filter_In;
    rewrite has_in in I; rewrite X, HG; auto).
  rewrite Z in J. auto.
Qed.
Lemma count_keeps s G p : counted s G -> next s <= may_go plan (map (missing G) plan) ->
  let (t, filled) := count s p in counted t (p :: G) /\ next t = next s /\
    (next s = may_go plan (map (missing G) plan) -> filled <> Some (next s) ->
     may_go plan (map (missing (p :: G)) plan) = next s).
Proof.
  intros [P F] L. unfold count.
  assert (FF : forall q, has (p :: fired s) q = has (p :: G) q) by (intros; rewrite !has_cons, F; auto).
  assert (SAME : map (missing (p :: G)) plan = map (missing G) plan ->
    counted (State (next s) (pending s) (p :: fired s)) (p :: G) /\ next s = next s /\
    (next s = may_go plan (map (missing G) plan) -> @None nat <> Some (next s) ->
     may_go plan (map (missing (p :: G)) plan) = next s)).
  { intros SM. split; [split; simpl; [rewrite P, SM; auto|auto]|]. split; auto. rewrite SM. auto. }
  destruct (place p plan) as [k|] eqn:Q; [|apply SAME, place_none; auto].
  destruct (Nat.ltb_spec k (next s)) as [B|B].
  - apply SAME. destruct (gone_before p plan k (next s) (missing G) Q B L) as [b [I Z]].
    apply map_ext. intros c. apply missing_same, (nothing_missing G p b); auto.
  - rewrite F. destruct (has G p) eqn:HG; simpl; [apply SAME, map_ext; intros; apply missing_same; auto|].
    destruct (expected p) eqn:X; simpl; [|apply SAME, map_ext; intros; apply missing_same; auto].
    assert (LM : lowered k (pending s) = map (missing (p :: G)) plan) by (rewrite P; apply lowered_missing; auto).
    split; [split; simpl; auto|]. split; auto. rewrite LM. intros M N.
    apply (stops plan (map (missing G) plan)); auto; rewrite ?map_length; auto.
    + intros j J. rewrite <- LM, P. apply lowered_other. lia.
    + destruct (Nat.eq_dec (next s) k) as [E|E]; [|left; rewrite <- LM, P; apply lowered_other; auto].
      right. subst k. destruct (Nat.eqb_spec (nth (next s) (map (missing (p :: G)) plan) 0) 0); [contradiction|auto].
Qed.
Lemma more_come G p : may_go plan (map (missing G) plan) <= may_go plan (map (missing (p :: G)) plan).
Proof.
  apply may_go_more; [rewrite !map_length; auto|]. clear apart. intros k. revert k.
  assert (M : forall b, missing (p :: G) b <= missing G b).
  { intros b. unfold missing. induction (members b) as [|q r IH]; simpl; auto. rewrite has_cons.
    destruct (expected q), (Nat.eqb q p), (has G q); simpl; lia. }
  induction plan as [|b l IH]; intros [|k]; simpl; auto.
Qed.
Lemma advance_due s G : counted s G -> next s <= may_go plan (map (missing G) plan) -> (waits = true -> next s = 0) ->
  counted (advance s) G /\ next (advance s) = due G.
Proof.
  intros [P F] L W. unfold advance, due. destruct waits; [split; [split; auto|auto]|]. split; [split; auto|]. simpl.
  rewrite P. symmetry. apply may_go_split. auto.
Qed.
Lemma opened_due early : counted (opened early) (rev early) /\ next (opened early) = due (rev early).
Proof.
  assert (E : forall l s G, counted s G -> next s = 0 ->
    counted (fold_left (fun s p => fst (count s p)) l s) (rev l ++ G) /\
      next (fold_left (fun s p => fst (count s p)) l s) = 0).
  { induction l as [|p l IH]; simpl; intros s G C Z; auto. rewrite <- app_assoc. simpl.
    pose proof (count_keeps s G p C ltac:(lia)) as K. destruct (count s p) as [t f]. destruct K as [C' [Z' _]].
    simpl. apply IH; auto. lia. }
  destruct (E early at_start [] start_counted eq_refl) as [C Z]. rewrite app_nil_r in C.
  unfold opened. apply advance_due; auto. lia.
Qed.
Lemma ready_due s G p : counted s G -> next s = due G ->
  counted (ready s p) (p :: G) /\ next (ready s p) = due (p :: G).
Proof.
  intros C D. unfold due in D.
  assert (L : next s <= may_go plan (map (missing G) plan)) by (rewrite D; destruct waits; lia).
  pose proof (count_keeps s G p C L) as K. unfold ready. destruct (count s p) as [t filled]. destruct K as [C' [N K]].
  pose proof (more_come G p) as M.
  assert (A : counted (advance t) (p :: G) /\ next (advance t) = due (p :: G)).
  { apply advance_due; auto; [lia|]. intros W. rewrite N, D, W. auto. }
  assert (O : filled <> Some (next t) -> counted t (p :: G) /\ next t = due (p :: G)).
  { intros X. split; auto. unfold due. rewrite N in *. destruct waits; [auto|]. symmetry. apply K; auto. }
  destruct filled as [k|]; [|apply O; discriminate]. destruct (Nat.eqb_spec k (next t)); [subst; auto|].
  apply O. intros X. inversion X. contradiction.
Qed.
(* B1: what has been launched is a prefix of the plan, and which depends on the set of gradients that came, not on their
   order or on when the opening was known. *)
Theorem launched_is_due early later : next (through early later) = due (rev (early ++ later)).
Proof.
  assert (E : forall l s G, counted s G -> next s = due G -> next (fold_left ready l s) = due (rev l ++ G)).
  { induction l as [|p l IH]; simpl; intros s G C D; auto. rewrite <- app_assoc. simpl.
    destruct (ready_due s G p C D) as [C' D']. apply IH; auto. }
  destruct (opened_due early) as [C D]. unfold through. rewrite (E later _ _ C D), rev_app_distr. auto.
Qed.
Theorem order_is_irrelevant early later early' later' : (forall p, In p (early ++ later) <-> In p (early' ++ later')) ->
  next (through early later) = next (through early' later').
Proof.
  intros H. rewrite !launched_is_due. unfold due. destruct waits; auto. f_equal. apply map_ext. intros b.
    unfold missing.
  f_equal. apply filter_ext. intros p. f_equal. f_equal. apply eq_true_iff_eq. rewrite !has_in, <- !in_rev. auto.
Qed.
(* B1: a window launches every bucket of the plan once, in plan order, whatever came and whatever did not. *)
Definition launches_of (s t : state) : list nat := seq (next s) (next t - next s).
Fixpoint in_turn (s : state) (l : list nat) : list nat :=
  match l with [] => seq (next s) (length plan - next s) | p :: r => launches_of s (ready s p) ++ in_turn (ready s p)
    r end.
Definition window_launches (early later : list nat) :
  list nat := launches_of at_start (opened early) ++ in_turn (opened early) later.
Theorem every_bucket_in_order early later : window_launches early later = seq 0 (length plan).
Proof.
  assert (LE : forall G, due G <= length plan) by (intros; unfold due; destruct waits; [lia|apply may_go_le]).
  assert (E : forall l s G, counted s G -> next s = due G -> in_turn s l = seq (next s) (length plan - next s)).
  { induction l as [|p l IH]; simpl; intros s G C D; auto. destruct (ready_due s G p C D) as [C' D'].
    rewrite (IH _ _ C' D'). unfold launches_of.
    assert (LO : next s <= next (ready s p)) by (rewrite D, D'; unfold due; destruct waits; [lia|apply more_come]).
    replace (seq (next (ready s p)) (length plan - next (ready s p)))
      with (seq (next s + (next (ready s p) - next s)) (length plan - next (ready s p))) by (f_equal; lia).
    rewrite <- seq_app. f_equal. pose proof (LE (p :: G)). lia. }
  destruct (opened_due early) as [C D]. unfold window_launches, launches_of. rewrite (E later _ _ C D). simpl.
  replace (seq (next (opened early)) (length plan - next (opened early)))
    with (seq (0 + (next (opened early) - 0)) (length plan - next (opened early))) by (f_equal; lia).
  rewrite <- seq_app. f_equal. pose proof (LE (rev early)). lia.
Qed.
End Window.
