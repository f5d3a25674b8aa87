(* Where elements lie in a flat bucket (knownddp/flat.py): strides of a dense tensor, and tensors laid end to end. *)
Require Import List Arith Lia Permutation Sorted Bool.
Import ListNotations.

(* A tensor's dimensions are pairs of size and stride; an index has one number a dimension. *)
Definition dims := list (nat * nat).
Fixpoint volume (t : dims) : nat := match t with [] => 1 | (n, _) :: r => n * volume r end.
Fixpoint fits (i : list nat) (t : dims) : Prop :=
  match i, t with [], [] => True | x :: i', (n, _) :: t' => x < n /\ fits i' t' | _, _ => False end.
Fixpoint offset (i : list nat) (t : dims) : nat :=
  match i, t with x :: i', (_, w) :: t' => x * w + offset i' t' | _, _ => 0 end.

(* Dimensions listed from the smallest stride outwards: the stride of each is the volume of those before it. That of a
   dimension of size 1 is free. *)
Fixpoint packed (w : nat) (t : dims) : Prop :=
  match t with [] => True | (n, s) :: r => (n = 1 \/ s = w) /\ packed (w * n) r end.
Definition dense (t : dims) : Prop := exists u, Permutation t u /\ packed 1 u.

(* -- dense strides are a bijection between indices and places *)

Fixpoint decode (o : nat) (t : dims) :
  list nat := match t with [] => [] | (n, _) :: r => (o mod n) :: decode (o / n) r end.
Lemma packed_in t : forall w i, fits i t -> packed w t ->
  exists q, offset i t = w * q /\ q < volume t /\ decode q t = i.
Proof.
  induction t as [|[n s] t IH]; intros w [|x i] F P; simpl in *; try tauto.
  - exists 0. repeat split; lia.
  - destruct F as [L F], P as [A P]. destruct (IH _ _ F P) as [q [E [Q D]]].
    exists (x + n * q). rewrite E. repeat split; [destruct A; subst; nia|nia|].
    rewrite (Nat.mul_comm n q), Nat.mod_add, Nat.div_add by lia.
    rewrite Nat.mod_small, Nat.div_small by lia. simpl. rewrite D. auto.
Qed.
Lemma packed_onto t : forall w o, packed w t -> o < volume t -> exists i, fits i t /\ offset i t = w * o.
Proof.
  induction t as [|[n s] t IH]; intros w o P L; simpl in *.
  - exists []. simpl. split; auto. lia.
  - destruct P as [A P]. assert (0 < n) by (destruct n; simpl in L; lia).
    destruct (IH (w * n) (o / n) P) as [i [F E]]; [apply Nat.div_lt_upper_bound; lia|].
    exists (o mod n :: i). simpl. split; [split; auto; apply Nat.mod_upper_bound; lia|].
    rewrite E. pose proof (Nat.div_mod o n).
    destruct A as [->| ->]; [rewrite Nat.mod_1_r, Nat.div_1_r; lia|nia].
Qed.
(* The order in which dimensions are listed does not matter. *)
Definition carries (f : list nat -> list nat) (a b : dims) : Prop := forall i, fits i a ->
  fits (f i) b /\ offset (f i) b = offset i a.
Lemma any_order a b : Permutation a b -> volume a = volume b /\ exists f g, carries f a b /\ carries g b a
  /\ (forall i, fits i a -> g (f i) = i) /\ (forall i, fits i b -> f (g i) = i).
Proof.
  induction 1 as [|[n s] a b _ [V [f [g [F [G [I J]]]]]]|[n s] [m r] a
                  |a b c _ [V [f [g [F [G [I J]]]]]] _ [V' [f' [g' [F' [G' [I' J']]]]]]].
  - split; auto. exists (fun i => i), (fun i => i). unfold carries. auto.
  - split; [simpl; auto|].
    exists (fun i => match i with x :: r => x :: f r | _ => [] end).
    exists (fun i => match i with x :: r => x :: g r | _ => [] end).
    unfold carries in *. split; [|split; [|split]]; intros [|x i] H; simpl in *; try tauto; destruct H as [L H].
    + destruct (F _ H) as [A ->]. auto.
    + destruct (G _ H) as [A ->]. auto.
    + rewrite I; auto.
    + rewrite J; auto.
  - split; [simpl; lia|].
    exists (fun i => match i with x :: y :: r => y :: x :: r | _ => [] end).
    exists (fun i => match i with x :: y :: r => y :: x :: r | _ => [] end).
    unfold carries. split; [|split; [|split]]; intros [|x [|y i]] H; simpl in *; try tauto; split; try tauto; lia.
  - split; [congruence|]. exists (fun i => f' (f i)), (fun i => g (g' i)). unfold carries in *.
    split; [|split; [|split]]; intros i H.
    + destruct (F _ H) as [A <-]. apply F'; auto.
    + destruct (G' _ H) as [A <-]. apply G; auto.
    + destruct (F _ H) as [A _]. rewrite I'; auto.
    + destruct (G' _ H) as [A _]. rewrite J; auto.
Qed.
(* C1: in range, no two indices at one place, no place without an index. *)
Theorem in_range t i : dense t -> fits i t -> offset i t < volume t.
Proof.
  intros [u [P D]] F. destruct (any_order _ _ P) as [-> [f [g [A _]]]]. destruct (A _ F) as [F' <-].
  destruct (packed_in u 1 _ F' D) as [q [E [L _]]]. lia.
Qed.
Theorem no_overlap t i j : dense t -> fits i t -> fits j t -> offset i t = offset j t -> i = j.
Proof.
  intros [u [P D]] F G E. destruct (any_order _ _ P) as [_ [f [g [A [_ [I _]]]]]].
  destruct (A _ F) as [F' EF], (A _ G) as [G' EG].
  destruct (packed_in u 1 _ F' D) as [q [Eq [_ Dq]]], (packed_in u 1 _ G' D) as [r [Er [_ Dr]]].
  rewrite <- (I _ F), <- (I _ G), <- Dq, <- Dr. f_equal. f_equal. lia.
Qed.
Theorem no_gap t o : dense t -> o < volume t -> exists i, fits i t /\ offset i t = o.
Proof.
  intros [u [P D]] L. destruct (any_order _ _ P) as [V [f [g [_ [B _]]]]]. rewrite V in L.
  destruct (packed_onto u 1 o D L) as [i [F E]]. exists (g i). destruct (B _ F) as [F' ->]. split; auto. lia.
Qed.

Lemma packed_snoc t d : forall w, packed w t -> (fst d = 1 \/ snd d = w * volume t) -> packed w (t ++ [d]).
Proof.
  induction t as [|[n s] t IH]; destruct d as [m r]; simpl; intros w P H; [split; auto; destruct H; [auto|right; lia]|].
  destruct P. split; auto. apply IH; simpl; auto. destruct H; auto. right. rewrite H. lia.
Qed.

(* -- is_dense and canonical_strides, as shipped *)

Fixpoint row_major (shape : list nat) : list nat :=
  match shape with [] => [] | _ :: r => fold_right (fun n w => Nat.max n 1 * w) 1 r :: row_major r end.
Fixpoint insert (d : nat * nat) (t : dims) : dims :=
  match t with [] => [d] | e :: r => if Nat.leb (snd d) (snd e) then d :: t else e :: insert d r end.
Definition inner_first (t : dims) : dims := fold_right insert [] (filter (fun d => negb (Nat.eqb (fst d) 1)) t).
Fixpoint steps (w : nat) (t : dims) : bool :=
  match t with [] => true | (n, s) :: r => Nat.eqb s w && steps (w * n) r end.
Definition has_zero (shape : list nat) : bool := existsb (Nat.eqb 0) shape.
Definition is_dense (shape strides : list nat) :
  bool := has_zero shape || steps 1 (inner_first (combine shape strides)).
(* Equal but for dimensions of size 1, whose stride means nothing. *)
Fixpoint alike (shape a b : list nat) : bool :=
  match shape, a, b with
  | n :: s, x :: a', y :: b' => (Nat.eqb n 1 || Nat.eqb x y) && alike s a' b'
  | [], [], [] => true
  | _, _, _ => false
  end.
Fixpoint ones (shape strides : list nat) : list nat :=
  match shape, strides with n :: s, x :: r => (if Nat.eqb n 1 then 1 else x) :: ones s r | _, _ => [] end.
Definition canonical (shape strides : list nat) : list nat :=
  if has_zero shape || negb (is_dense shape strides) || alike shape strides (row_major shape) then row_major shape
  else ones shape strides.

Lemma insert_perm d t : Permutation (insert d t) (d :: t).
Proof. induction t; simpl; auto. destruct (Nat.leb _ _); auto. rewrite IHt. apply perm_swap. Qed.
Lemma sort_perm t : Permutation (fold_right insert [] t) t.
Proof. induction t; simpl; auto. rewrite insert_perm, IHt; auto. Qed.
Lemma split_perm (p : nat * nat -> bool) t : Permutation t (filter (fun d => negb (p d)) t ++ filter p t).
Proof. induction t; simpl; auto. destruct (p a); simpl; [rewrite <- Permutation_middle|]; auto. Qed.
Lemma steps_packed t : forall w r, steps w t = true -> Forall (fun d => fst d = 1) r -> packed w (t ++ r).
Proof.
  induction t as [|[n s] t IH]; simpl; intros w r S F.
  - revert w. induction F as [|[n s] r E _ IH]; simpl in *; auto.
  - apply andb_prop in S as [E S]. apply Nat.eqb_eq in E. auto.
Qed.
Lemma test_dense t : steps 1 (inner_first t) = true -> dense t.
Proof.
  intros S. exists (inner_first t ++ filter (fun d => Nat.eqb (fst d) 1) t). split.
  - unfold inner_first. rewrite sort_perm. apply split_perm.
  - apply steps_packed; auto. apply Forall_forall. intros d I. apply filter_In in I as [_ I]. apply Nat.eqb_eq; auto.
Qed.
(* C2: strides that pass the shipped test are dense; row-major ones are;
  so what canonical_strides gives always is, and it
   is what it was given where that is dense. *)
Theorem test_is_sound shape strides : has_zero shape = false -> is_dense shape strides = true ->
  dense (combine shape strides).
Proof. unfold is_dense. intros -> S. apply test_dense; auto. Qed.
Lemma row_major_length s : length (row_major s) = length s.
Proof. induction s; simpl; auto. Qed.
Lemma volume_perm a b : Permutation a b -> volume a = volume b.
Proof. intros P. apply (any_order _ _ P). Qed.
Lemma has_zero_cons n s : has_zero (n :: s) = false -> 0 < n /\ has_zero s = false.
Proof. unfold has_zero. simpl. intros H. apply orb_false_elim in H as [A B]. destruct n; [discriminate|].
  split; [lia|auto]. Qed.
Theorem row_major_dense shape : has_zero shape = false -> dense (combine shape (row_major shape)).
Proof.
  intros Z. exists (rev (combine shape (row_major shape))). split; [apply Permutation_rev|].
  induction shape as [|n s IH]; simpl; auto. apply has_zero_cons in Z as [N Z].
  apply packed_snoc; auto. right. unfold snd. rewrite Nat.mul_1_l.
  rewrite (volume_perm _ (combine s (row_major s))) by (symmetry; apply Permutation_rev). clear IH N.
  induction s as [|m s IH]; simpl; auto. apply has_zero_cons in Z as [M Z]. rewrite IH by auto.
    rewrite Nat.max_l by lia. auto.
Qed.
Lemma alike_ones shape : forall strides, length strides = length shape ->
  alike shape (ones shape strides) strides = true.
Proof.
  induction shape as [|n s IH]; intros [|x r] L; simpl in *; try discriminate; auto.
  rewrite IH by lia. destruct (Nat.eqb n 1); simpl; rewrite ?Nat.eqb_refl; auto.
Qed.
Lemma alike_filter shape : forall a b, alike shape a b = true ->
  filter (fun d => negb (Nat.eqb (fst d) 1)) (combine shape a) = filter (fun d => negb (Nat.eqb (fst d) 1)) (combine
    shape b).
Proof.
  induction shape as [|n s IH]; intros [|x a] [|y b] A; simpl in *; try discriminate; auto.
  apply andb_prop in A as [E A]. rewrite (IH _ _ A). destruct (Nat.eqb n 1); simpl in *; auto.
  apply Nat.eqb_eq in E. subst. auto.
Qed.
Lemma alike_dense shape a b : alike shape a b = true -> is_dense shape a = is_dense shape b.
Proof. intros A. unfold is_dense, inner_first. rewrite (alike_filter _ _ _ A). auto. Qed.
Theorem canonical_is_dense shape strides : length strides = length shape -> has_zero shape = false ->
  dense (combine shape (canonical shape strides)).
Proof.
  intros L Z. unfold canonical. rewrite Z. simpl.
    destruct (is_dense shape strides) eqn:D; simpl; [|apply row_major_dense; auto].
  destruct (alike shape strides (row_major shape)); [apply row_major_dense; auto|].
  apply test_is_sound; auto. rewrite (alike_dense _ _ strides); auto. apply alike_ones; auto.
Qed.
Lemma alike_sym shape : forall a b, alike shape a b = alike shape b a.
Proof. induction shape as [|n s IH]; intros [|x a] [|y b]; simpl; auto. rewrite IH, (Nat.eqb_sym x y). auto. Qed.
Theorem canonical_keeps_dense shape strides : length strides = length shape -> has_zero shape = false ->
  is_dense shape strides = true -> alike shape (canonical shape strides) strides = true.
Proof.
  intros L Z D. unfold canonical. rewrite Z, D. simpl.
  destruct (alike shape strides (row_major shape)) eqn:A; [rewrite alike_sym; auto|apply alike_ones; auto].
Qed.

(* -- the shipped test asks for no more than is needed *)

Definition differ (t : dims) : Prop := forall i j, fits i t -> fits j t -> offset i t = offset j t -> i = j.
Definition fill (t : dims) : Prop := forall o, o < volume t -> exists i, fits i t /\ offset i t = o.
Definition zeros (t : dims) : list nat := map (fun _ => 0) t.
Lemma fits_zeros t : Forall (fun d => 0 < fst d) t -> fits (zeros t) t.
Proof. induction 1 as [|[n s] t]; simpl; auto. Qed.
Lemma offset_zeros t : offset (zeros t) t = 0.
Proof. induction t as [|[n s] t]; simpl; auto. Qed.
Lemma fits_join a : forall i b j, fits i a -> fits j b ->
  fits (i ++ j) (a ++ b) /\ offset (i ++ j) (a ++ b) = offset i a + offset j b.
Proof.
  induction a as [|[n s] a IH]; intros [|x i] b j F G; simpl in *; try tauto. destruct F as [L F].
  destruct (IH i b j F G). split; [auto|lia].
Qed.
Lemma fits_split a : forall b i, fits i (a ++ b) -> exists x y, i = x ++ y /\ fits x a /\ fits y b.
Proof.
  induction a as [|[n s] a IH]; intros b i F; simpl in *; [exists [], i; simpl; auto|].
  destruct i as [|x i]; simpl in F; [tauto|]. destruct F as [L F]. destruct (IH b i F) as [u [v [E [U W]]]]. subst.
  exists (x :: u), v. simpl. auto.
Qed.
Lemma zero_or_far s t : Forall (fun d => fst d = 1 \/ s <= snd d) t -> forall i, fits i t ->
  i = zeros t \/ s <= offset i t.
Proof.
  induction 1 as [|[n w] t H _ IH]; intros [|x i] F; simpl in *; auto; try contradiction. destruct F as [L F].
  destruct x as [|x]; [|right; destruct H; nia]. destruct (IH i F) as [->|G]; [left; auto|right; lia].
Qed.
Lemma volume_join a b : volume (a ++ b) = volume a * volume b.
Proof. induction a as [|[n s] a IH]; simpl; [lia|]. rewrite IH. lia. Qed.
Lemma volume_pos t : Forall (fun d => 0 < fst d) t -> 0 < volume t.
Proof. induction 1 as [|[n s] t]; simpl in *; [lia|nia]. Qed.
Lemma packed_dense t : packed 1 t -> dense t.
Proof. intros P. exists t. auto. Qed.
Definition nearer (d e : nat * nat) : Prop := snd d <= snd e.
Lemma steps_needed ones : Forall (fun d => fst d = 1) ones -> forall r p, packed 1 p -> Forall (fun d => 0 < fst d) p ->
  StronglySorted nearer r -> Forall (fun d => 2 <= fst d) r -> differ (p ++ r ++ ones) -> fill (p ++ r ++ ones) ->
  steps (volume p) r = true.
Proof.
  intros O. induction r as [|[n s] r IH]; intros p P Pp S T D F; simpl; auto.
  pose proof (Forall_inv T) as N2. pose proof (Forall_inv_tail T) as T'. cbn in N2.
  apply StronglySorted_inv in S as [S FN]. change (((n, s) :: r) ++ ones) with ((n, s) :: (r ++ ones)) in *.
  assert (Z : Forall (fun d => 0 < fst d) (r ++ ones)).
  { apply Forall_app; split; [eapply Forall_impl; [|apply T']|eapply Forall_impl; [|apply O]]; simpl; intros; lia. }
  assert (Q : Forall (fun d => 0 < fst d) ((n, s) :: r ++ ones)) by (constructor; [simpl; lia|auto]).
  assert (E : s = volume p).
  { destruct (lt_eq_lt_dec s (volume p)) as [[L|L]|L]; auto; exfalso.
    - destruct (no_gap p s (packed_dense p P) L) as [i [Fi Oi]].
      destruct (fits_join p i ((n, s) :: r ++ ones) (zeros ((n, s) :: r ++ ones)) Fi (fits_zeros _ Q)) as [A B].
      assert (G : fits (1 :: zeros (r ++ ones)) ((n, s) :: r ++ ones)) by (simpl; split; [lia|apply fits_zeros; auto]).
      destruct (fits_join p (zeros p) _ _ (fits_zeros p Pp) G) as [A' B'].
      assert (X : i ++ zeros ((n, s) :: r ++ ones) = zeros p ++ 1 :: zeros (r ++ ones)).
      { apply D; auto. rewrite offset_zeros in B. cbn [offset] in B'. rewrite !offset_zeros in B'.
        transitivity s; [transitivity (offset i p + 0); [exact B|lia]|symmetry; transitivity (0 + (1 * s + 0));
          [exact B'|lia]]. }
      assert (LN : length i = length (zeros p)).
      { clear -Fi. unfold zeros. rewrite map_length. revert i Fi.
        induction p as [|[m w] p IHp]; intros [|x i] Fi; simpl in *; try tauto.
        f_equal. apply IHp. tauto. }
      apply (f_equal (skipn (length i))) in X. rewrite !skipn_app, LN, !skipn_all, Nat.sub_diag in X.
      rewrite <- LN, skipn_all in X. simpl in X. discriminate.
    - pose proof (volume_pos _ Z). pose proof (volume_pos _ Pp).
      destruct (F (volume p)) as [i [Fi Oi]]; [|].
      { rewrite volume_join. change (volume ((n, s) :: r ++ ones)) with (n * volume (r ++ ones)).
        assert (2 <= n * volume (r ++ ones)) by nia. nia. }
      destruct (fits_split p _ i Fi) as [x [y [E [Fx Fy]]]]. subst i. destruct (fits_join p x _ y Fx Fy) as [_ B].
      pose proof (in_range p x (packed_dense p P) Fx).
      destruct (zero_or_far s ((n, s) :: r ++ ones)) with (i := y) as [E|E]; auto.
      + constructor; [right; simpl; auto|]. apply Forall_app; split.
        * eapply Forall_impl; [|apply FN]. unfold nearer. simpl. auto.
        * eapply Forall_impl; [|apply O]. simpl. auto.
      + subst y. rewrite offset_zeros in B. simpl app in *. lia.
      + simpl app in *. lia. }
  subst s. rewrite Nat.eqb_refl. simpl.
    replace (volume p * n) with (volume (p ++ [(n, volume p)])) by (rewrite volume_join; simpl; lia).
  apply IH; auto.
  - apply packed_snoc; auto. right. simpl. lia.
  - apply Forall_app; split; auto. constructor; [simpl; lia|auto].
  - rewrite <- app_assoc. auto.
  - rewrite <- app_assoc. auto.
Qed.
Lemma insert_nearer d t : StronglySorted nearer t -> StronglySorted nearer (insert d t).
Proof.
  induction t as [|e t IH]; simpl; intros S; [repeat constructor|]. inversion S; subst.
  destruct (Nat.leb_spec (snd d) (snd e)).
  - constructor; auto. constructor; [auto|]. eapply Forall_impl; [|apply H2]. unfold nearer. intros; lia.
  - constructor; auto. apply Forall_forall. intros f I. eapply Permutation_in in I; [|apply insert_perm].
    destruct I as [I|I]; [subst; unfold nearer; lia|]. rewrite Forall_forall in H2. auto.
Qed.
(* C2: strides under which all elements have places of their own, without gaps, pass the shipped test. *)
Theorem test_is_complete shape strides : has_zero shape = false -> differ (combine shape strides) ->
  fill (combine shape strides) ->
  is_dense shape strides = true.
Proof.
  intros Z D F. unfold is_dense. rewrite Z. simpl. set (t := combine shape strides) in *.
  assert (TP : Forall (fun d => 0 < fst d) t).
  { unfold t. clear -Z. revert strides. induction shape as [|n s IH]; intros [|x r]; simpl; auto.
    apply has_zero_cons in Z as [N Z]. constructor; auto. }
  set (ones := filter (fun d => Nat.eqb (fst d) 1) t).
  assert (P : Permutation t (inner_first t ++ ones)) by (unfold inner_first; rewrite sort_perm; apply split_perm).
  destruct (any_order _ _ P) as [V [f [g [A [B [I J]]]]]].
  apply (steps_needed ones) with (p := []); simpl; auto.
  - apply Forall_forall. intros d X. apply filter_In in X as [_ X]. apply Nat.eqb_eq; auto.
  - unfold inner_first. generalize (filter (fun d : nat * nat => negb (Nat.eqb (fst d) 1)) t). clear. intros l.
    induction l; simpl; [constructor|]. apply insert_nearer; auto.
  - apply Forall_forall. intros d X. unfold inner_first in X. eapply Permutation_in in X; [|apply sort_perm].
    apply filter_In in X as [X Y]. rewrite Forall_forall in TP. specialize (TP d X).
      destruct (Nat.eqb_spec (fst d) 1); [discriminate|lia].
  - intros i j X Y E. destruct (B _ X) as [X' EX], (B _ Y) as [Y' EY]. rewrite <- (J _ X), <- (J _ Y). f_equal.
    apply D; auto. congruence.
  - intros o L. rewrite <- V in L. destruct (F o L) as [i [X E]]. destruct (A _ X) as [X' EX]. exists (f i).
    split; auto. congruence.
Qed.
