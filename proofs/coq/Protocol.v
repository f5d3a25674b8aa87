(* What ranks learn from messages combined by OR (knownddp/messages.py),
  that all issue the same sequence of collectives,
   and that none waits for ever; for any number of ranks. *)
Require Import List Arith Lia Bool NArith Permutation.
Require Import Launch.
Import ListNotations.

(* -- messages *)

Definition combined (ms : list N) : N := fold_right N.lor 0%N ms.
Definition complement (w v : N) : N := N.lxor v (N.ones w).
Theorem arrival_is_irrelevant ms ns : Permutation ms ns -> combined ms = combined ns.
Proof. induction 1; simpl; try congruence. rewrite !N.lor_assoc. f_equal. apply N.lor_comm. Qed.
Lemma combined_bit ms b : N.testbit (combined ms) b = existsb (fun m => N.testbit m b) ms.
Proof. induction ms; simpl; [auto|]. rewrite N.lor_spec, IHms. auto. Qed.
(* B2: a flag is in the combined message exactly if some rank sent it ... *)
Theorem some_rank_sent mask ms : N.land (combined ms) mask <> 0%N <-> Exists (fun m => N.land m mask <> 0%N) ms.
Proof.
  assert (Z : forall a, a <> 0%N <-> exists b, N.testbit a b = true).
  { intros a. split.
    - intros NZ. exists (N.log2 a). apply N.bit_log2; auto.
    - intros [b B] E. subst. rewrite N.bits_0 in B. discriminate. }
  rewrite Z, Exists_exists. split.
  - intros [b B]. rewrite N.land_spec, combined_bit in B. apply andb_prop in B as [B M].
    apply existsb_exists in B as [m [I B]]. exists m. split; auto. apply Z. exists b. rewrite N.land_spec, B, M. auto.
  - intros [m [I NZ]]. apply Z in NZ as [b B]. exists b. rewrite N.land_spec, combined_bit in *.
    apply andb_prop in B as [B M].
    rewrite M, andb_true_r. apply existsb_exists. exists m. auto.
Qed.
(* ... and a number that travels with its complement contradicts itself exactly if two ranks sent different ones. *)
Theorem complement_tells w vs : Forall (fun v => v < 2 ^ w)%N vs ->
  N.land (combined vs) (combined (map (complement w) vs)) = 0%N <-> (forall a b, In a vs -> In b vs -> a = b).
Proof.
  intros F. rewrite Forall_forall in F.
  assert (H : forall v b, In v vs -> (w <= b)%N -> N.testbit v b = false).
  { intros v b I L. specialize (F v I). destruct (N.eq_dec v 0) as [->|NZ]; [apply N.bits_0|].
    apply N.bits_above_log2. apply N.log2_lt_pow2 in F; lia. }
  split.
  - intros Z a b A B. apply N.bits_inj. intros k.
    assert (K : N.testbit (N.land (combined vs) (combined (map (complement w) vs))) k = false) by (rewrite Z;
      apply N.bits_0).
    rewrite N.land_spec, !combined_bit in K. destruct (N.lt_ge_cases k w) as [L|L]; [|rewrite (H a k), (H b k); auto].
    assert (G : forall x y, In x vs -> In y vs -> N.testbit x k = true -> N.testbit y k = false -> False).
    { intros x y X Y Tx Ty. assert (E : existsb (fun m => N.testbit m k) vs = true) by (apply existsb_exists; eauto).
      rewrite E in K. simpl in K. assert (C : existsb (fun m => N.testbit m k) (map (complement w) vs) = true).
      { apply existsb_exists. exists (complement w y). split; [apply in_map; auto|]. unfold complement.
        rewrite N.lxor_spec, Ty, N.ones_spec_low; auto. }
      rewrite C in K. discriminate. }
    destruct (N.testbit a k) eqn:Ta, (N.testbit b k) eqn:Tb; auto; exfalso; eauto.
  - intros S. apply N.bits_inj. intros k. rewrite N.bits_0, N.land_spec, !combined_bit.
    destruct (existsb (fun m => N.testbit m k) vs) eqn:E; auto. simpl.
    destruct (existsb (fun m => N.testbit m k) (map (complement w) vs)) eqn:C; auto. exfalso.
    apply existsb_exists in E as [x [X Tx]]. apply existsb_exists in C as [c [I Tc]].
    apply in_map_iff in I as [y [<- Y]]. rewrite (S y x Y X) in Tc. unfold complement in Tc.
    rewrite N.lxor_spec, Tx in Tc. destruct (N.lt_ge_cases k w) as [L|L].
    + rewrite N.ones_spec_low in Tc by auto. discriminate.
    + rewrite (H x k X L) in Tx. discriminate.
Qed.

(* -- one common sequence *)

(* What all ranks know after a window is a function of what all knew before it, and of the two combined messages and the
   combined order: plans, the late round, whether the order round is due, faults. *)
Inductive tag := Open | Bucket (k : nat) | Close | Late (k : nat) | Outcome | Order | Testimony.
Record told := Told {
  opening_fails : bool; plan : list Launch.bucket; closing_fails : bool; late : option nat; late_fails : bool;
    order_due : bool }.
(* What differs between ranks. *)
Record local := Local { expects : nat -> bool; waits_for_end : bool; early : list nat; later : list nat }.
Definition window (t : told) (l : local) : list tag :=
  Open :: if opening_fails t then [Testimony] else
  map Bucket (window_launches (plan t) (expects l) (waits_for_end l) (early l) (later l)) ++ Close ::
  if closing_fails t then [Testimony] else
  match late t with None => [] | Some n => map Late (seq 0 n) ++ [Outcome] end ++
  if late_fails t then [Testimony] else if order_due t then [Order] else [].
Section Training.
Variable shared : Type.
Variable tells : shared -> N -> N -> told.
Variable after : shared -> N -> N -> shared.
Variable well_planned : forall s o c, NoDup (concat (map members (plan (tells s o c)))).
(* The combined messages of each window, and what each rank's backward did in it. *)
Fixpoint training (s : shared) (messages : list (N * N)) (mine : list local) : list tag :=
  match messages, mine with
  | (o, c) :: ms, l :: ls => window (tells s o c) l ++ training (after s o c) ms ls
  | _, _ => []
  end.
(* B3: every rank issues the same collectives in the same order, in every window, whatever its own backwards did. *)
Theorem common_sequence messages : forall s mine yours, length mine = length messages ->
  length yours = length messages ->
  training s messages mine = training s messages yours.
Proof.
  induction messages as [|[o c] ms IH]; intros s [|l ls] [|m mm] L M; simpl in *; try lia; auto.
  rewrite (IH (after s o c) ls mm) by lia. f_equal. unfold window.
    rewrite !every_bucket_in_order by apply well_planned. auto.
Qed.
End Training.

(* -- no rank waits for ever *)

(* A rank's program: what it issues, which does not block, and waits for what it issued itself (the k-th, from 0). *)
Inductive act := Issue | Wait (k : nat).
Record rank := Rank { issued : nat; todo : list act }.
Fixpoint waits_for_own (total n : nat) (l : list act) : Prop :=
  match l with
  | [] => n = total
  | Issue :: r => waits_for_own total (S n) r
  | Wait k :: r => k < n /\ waits_for_own total n r
  end.
Fixpoint waits_for_own_b (total n : nat) (l : list act) : bool :=
  match l with
  | [] => Nat.eqb n total
  | Issue :: r => waits_for_own_b total (S n) r
  | Wait k :: r => Nat.ltb k n && waits_for_own_b total n r
  end.
(* The k-th collective is over once every rank has issued its k-th. *)
Definition is_over (ranks : list rank) (k : nat) : Prop := forall r, In r ranks -> k < issued r.
Inductive acts (ranks : list rank) : rank -> rank -> Prop :=
  | issues n l : acts ranks (Rank n (Issue :: l)) (Rank (S n) l)
  | passes n k l : is_over ranks k -> acts ranks (Rank n (Wait k :: l)) (Rank n l).
Inductive step : list rank -> list rank -> Prop :=
  steps before r r' behind : acts (before ++ r :: behind) r r' -> step (before ++ r :: behind) (before ++ r' :: behind).
Definition sound (total : nat) (ranks : list rank) : Prop := forall r, In r ranks ->
  waits_for_own total (issued r) (todo r).
Definition finished (ranks : list rank) : Prop := forall r, In r ranks -> todo r = [].
Definition left (ranks : list rank) : nat := fold_right (fun r n => length (todo r) + n) 0 ranks.

Lemma waits_for_own_dec total l : forall n, waits_for_own_b total n l = true <-> waits_for_own total n l.
Proof.
  induction l as [|[|k] l IH]; intros n; simpl; [apply Nat.eqb_eq|auto|]. rewrite andb_true_iff, IH, Nat.ltb_lt. tauto.
Qed.
Lemma issued_le total l : forall n, waits_for_own total n l -> n <= total.
Proof. induction l as [|[|k] l IH]; simpl; intros n W; [lia| |apply IH; tauto]. apply IH in W. lia. Qed.
(* B4: as long as some rank has something left to do, some rank can do it ... *)
Theorem someone_can_go_on total ranks : sound total ranks -> ~ finished ranks -> exists ranks', step ranks ranks'.
Proof.
  intros W U.
  assert (E : exists r, In r ranks /\ todo r <> []).
  { clear W. induction ranks as [|r l IH]; [exfalso; apply U; intros r []|]. destruct (todo r) eqn:T.
    - destruct IH as [q [I N]]; [|exists q; simpl; auto]. intros F. apply U. intros q [Q|Q]; [subst; auto|auto].
    - exists r. simpl. rewrite T. split; [auto|discriminate]. }
  assert (G : exists r r', In r ranks /\ acts ranks r r').
  { destruct E as [r [I N]]. remember (issued r) as n eqn:En. revert r I N En.
    induction n as [n IH] using lt_wf_ind. intros [c l] I N En. simpl in *. subst c. pose proof (W _ I) as w.
      simpl in w.
    destruct l as [|[|k] l]; [contradiction|exists (Rank n (Issue :: l)), (Rank (S n) l); split; [auto|constructor]|].
    destruct w as [kn w]. destruct (Forall_Exists_dec (fun q => k < issued q) (fun q => lt_dec k (issued q)) ranks) as
      [F|X].
    - exists (Rank n (Wait k :: l)), (Rank n l). split; auto. constructor. intros q Q. rewrite Forall_forall in F. auto.
    - apply Exists_exists in X as [q [Q NQ]]. pose proof (W q Q) as wq. destruct (todo q) as [|a t] eqn:T.
      + simpl in wq. pose proof (issued_le _ _ _ w). lia.
      + apply (IH (issued q)) with (r := q); auto; [lia|rewrite T; discriminate]. }
  destruct G as [r [r' [I A]]]. apply in_split in I as [a [b ->]]. exists (a ++ r' :: b). constructor. auto.
Qed.
Lemma left_app a b : left (a ++ b) = left a + left b.
Proof. unfold left. induction a; simpl; [auto|]. rewrite IHa. lia. Qed.
(* ... which stays so, and each step leaves less to do: so every run ends, and with every rank done. *)
Theorem steps_stay_sound total ranks ranks' : sound total ranks -> step ranks ranks' ->
  sound total ranks' /\ left ranks = S (left ranks').
Proof.
  intros W S. destruct S as [a r r' b A]. split.
  - intros q Q. apply in_app_or in Q as [Q|[Q|Q]]; [apply W, in_or_app; auto|subst q|apply W, in_or_app; simpl; auto].
    assert (I : In r (a ++ r :: b)) by (apply in_or_app; simpl; auto). specialize (W r I).
      inversion A; subst; simpl in *; tauto.
  - rewrite !left_app. simpl. assert (L : length (todo r) = Datatypes.S (length (todo r'))) by (inversion A; auto). lia.
Qed.
Inductive run : list rank -> list rank -> Prop :=
  | stays ranks : run ranks ranks
  | goes_on a b c : step a b -> run b c -> run a c.
Theorem every_run_ends_well total ranks ends : sound total ranks -> run ranks ends ->
  (forall more, ~ step ends more) -> finished ends.
Proof.
  intros W R N. assert (S : sound total ends) by (clear N; induction R; auto; apply IHR;
    apply (steps_stay_sound _ _ _ W H)).
  assert (D : finished ends \/ ~ finished ends).
  { clear. induction ends as [|r l IH]; [left; intros r []|]. destruct (todo r) eqn:T.
    - destruct IH as [F|F]; [left; intros q [Q|Q]; [subst; auto|auto]|right; intros G; apply F; intros q Q; apply G;
      simpl; auto].
    - right. intros F. specialize (F r (or_introl eq_refl)). congruence. }
  destruct D as [F|F]; auto. destruct (someone_can_go_on total ends S F) as [more M]. exfalso. eapply N; eauto.
Qed.
