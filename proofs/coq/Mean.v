(* How far a mean may be off: each rank's share is divided by the number of ranks and rounded, then shares are added in
   any order, each sum rounded. *)
Require Import Reals Lra.
Open Scope R_scope.

Section Mean.
Variable fl : R -> R.    (* rounding to the dtype of the bucket, where nothing overflows *)
Variables u eta : R.     (* the unit roundoff, and half the distance of subnormal numbers *)
Hypothesis u_pos : 0 <= u.
Hypothesis eta_pos : 0 <= eta.
Hypothesis fl_quotient : forall x, Rabs (fl x - x) <= u * Rabs x + eta.
(* Sums of two numbers of the dtype: those that would be subnormal are exact. *)
Hypothesis fl_sum : forall x y, Rabs (fl (fl x + fl y) - (fl x + fl y)) <= u * Rabs (fl x + fl y).
Variable n : R.          (* the number of ranks *)

(* A leaf is a rank's gradient. All-reduce along a ring is a tree as deep as there are ranks. *)
Inductive tree := Share (x : R) | Sum (a b : tree).
Fixpoint wanted t := match t with Share x => x / n | Sum a b => wanted a + wanted b end.
Fixpoint computed t := match t with Share x => fl (x / n) | Sum a b => fl (computed a + computed b) end.
Fixpoint size t := match t with Share x => Rabs (x / n) | Sum a b => size a + size b end.
Fixpoint depth t := match t with Share _ => 1%nat | Sum a b => S (Nat.max (depth a) (depth b)) end.
Fixpoint ranks t := match t with Share _ => 1 | Sum a b => ranks a + ranks b end.
Definition bound t := ((1 + u) ^ depth t - 1) * size t + ranks t * eta * (1 + u) ^ depth t.

Lemma size_pos t : 0 <= size t.
Proof. induction t; simpl; [apply Rabs_pos|lra]. Qed.
Lemma ranks_pos t : 0 <= ranks t.
Proof. induction t; simpl; lra. Qed.
Lemma wanted_size t : Rabs (wanted t) <= size t.
Proof. induction t; simpl; [lra|]. eapply Rle_trans; [apply Rabs_triang|lra]. Qed.
Lemma is_rounded t : exists x, computed t = fl x.
Proof. destruct t; simpl; eauto. Qed.
Lemma grown t d : (depth t <= d)%nat -> bound t <= ((1 + u) ^ d - 1) * size t + ranks t * eta * (1 + u) ^ d.
Proof.
  intros L. unfold bound. assert ((1 + u) ^ depth t <= (1 + u) ^ d) by (apply Rle_pow; [lra|auto]).
  pose proof (size_pos t). assert (0 <= ranks t * eta) by (apply Rmult_le_pos; [apply ranks_pos|auto]).
  apply Rplus_le_compat; [apply Rmult_le_compat_r|apply Rmult_le_compat_l]; lra.
Qed.
(* C10 *)
Theorem mean_error t : Rabs (computed t - wanted t) <= bound t.
Proof.
  induction t as [x|a IHa b IHb].
  - unfold bound. simpl. pose proof (fl_quotient (x / n)). pose proof (Rmult_le_pos _ _ eta_pos u_pos). lra.
  - set (d := Nat.max (depth a) (depth b)).
    pose proof (grown a d (Nat.le_max_l _ _)) as Ga. pose proof (grown b d (Nat.le_max_r _ _)) as Gb.
    destruct (is_rounded a) as [x Ex], (is_rounded b) as [y Ey].
    pose proof (fl_sum x y) as F. rewrite <- Ex, <- Ey in F.
    set (e := computed a + computed b) in *. set (w := wanted a + wanted b).
    set (p := (1 + u) ^ d) in *. set (m := size a + size b). set (k := ranks a + ranks b).
    assert (E : Rabs (e - w) <= (p - 1) * m + k * eta * p).
    { unfold e, w. replace (computed a + computed b - (wanted a + wanted b))
        with ((computed a - wanted a) + (computed b - wanted b)) by ring.
      eapply Rle_trans; [apply Rabs_triang|]. unfold m, k. lra. }
    assert (W : Rabs w <= m) by (apply (wanted_size (Sum a b))).
    assert (Y : Rabs e <= p * m + k * eta * p).
    { replace e with ((e - w) + w) by ring. eapply Rle_trans; [apply Rabs_triang|]. lra. }
    assert (Z : u * Rabs e <= u * (p * m + k * eta * p)) by (apply Rmult_le_compat_l; auto).
    unfold bound. simpl. fold e w d m k p.
    replace (fl e - w) with ((fl e - e) + (e - w)) by ring.
    eapply Rle_trans; [apply Rabs_triang|]. lra.
Qed.
End Mean.
