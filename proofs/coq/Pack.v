(* Gradients packed into a flat bucket and read back (FlatBucket of knownddp/flat.py): tensors of canonical strides laid
   end to end, each element written and read by its logical index. *)
Require Import List Arith Lia Permutation.
Require Import Layout.
Import ListNotations.

Definition laid (t : dims) : Prop := dense t \/ volume t = 0.
(* An element is a parameter's position in the bucket and a logical index into it. *)
Definition element : Type := nat * list nat.
Definition is_element (ts : list dims) (e : element) : Prop := fst e < length ts /\ fits (snd e) (nth (fst e) ts []).
Fixpoint begins_at (ts : list dims) (p : nat) : nat :=
  match ts, p with t :: r, S q => volume t + begins_at r q | _, _ => 0 end.
Definition numel (ts : list dims) : nat := fold_right (fun t n => volume t + n) 0 ts.
Definition place (ts : list dims) (e : element) : nat := begins_at ts (fst e) + offset (snd e) (nth (fst e) ts []).

Lemma fits_dense t i : laid t -> fits i t -> dense t.
Proof.
  intros [D|Z] F; auto. exfalso. revert i F Z.
    induction t as [|[n s] t IH]; intros [|x i]; simpl; try tauto; [discriminate|].
  intros [L F] Z. apply Nat.eq_mul_0 in Z as [Z|Z]; [lia|eapply IH; eauto].
Qed.
Lemma laid_nth ts p : Forall laid ts -> p < length ts -> laid (nth p ts []).
Proof. intros F L. rewrite Forall_forall in F. apply F, nth_In; auto. Qed.

(* C3: segments tile the flat tensor. Each element has a place in it, no two share one, and no place is without one. *)
Theorem place_in_range ts e : Forall laid ts -> is_element ts e -> place ts e < numel ts.
Proof.
  destruct e as [p i]. unfold place, is_element. simpl. revert p.
    induction ts as [|t ts IH]; intros p F [L H]; simpl in *; [lia|].
  inversion F; subst. destruct p as [|p].
  - pose proof (in_range t i (fits_dense _ _ H2 H) H). lia.
  - assert (B : p < length ts) by lia. specialize (IH p H3 (conj B H)). lia.
Qed.
Theorem places_differ ts e f : Forall laid ts -> is_element ts e -> is_element ts f -> place ts e = place ts f -> e = f.
Proof.
  destruct e as [p i], f as [q j]. unfold place, is_element. simpl. revert p q.
  induction ts as [|t ts IH]; intros p q F [L H] [M G] E; simpl in *; [lia|]. inversion F; subst.
  destruct p as [|p], q as [|q].
  - f_equal. simpl in E. apply (no_overlap t i j); auto. apply (fits_dense t i); auto.
  - pose proof (in_range t i (fits_dense _ _ H2 H) H). lia.
  - pose proof (in_range t j (fits_dense _ _ H2 G) G). lia.
  - assert (B : p < length ts) by lia. assert (C : q < length ts) by lia.
    assert (X : (p, i) = (q, j)) by (apply IH; auto; lia). inversion X; subst; auto.
Qed.
Theorem every_place_is_used ts o : Forall laid ts -> o < numel ts -> exists e, is_element ts e /\ place ts e = o.
Proof.
  unfold place, is_element. revert o. induction ts as [|t ts IH]; intros o F L; simpl in *; [lia|]. inversion F; subst.
  destruct (lt_dec o (volume t)) as [B|B].
  - assert (D : dense t) by (destruct H1; auto; lia). destruct (no_gap t o D B) as [i [Fi E]].
    exists (0, i). simpl. split; [split; [lia|auto]|auto].
  - destruct (IH (o - volume t) H2) as [[p i] [[Lp Fi] E]]; [lia|]. exists (S p, i). simpl in *.
    split; [split; [lia|auto]|lia].
Qed.

Fixpoint indices (t : dims) : list (list nat) :=
  match t with [] => [[]] | (n, _) :: r => flat_map (fun x => map (cons x) (indices r)) (seq 0 n) end.
Lemma indices_all t : forall i, In i (indices t) <-> fits i t.
Proof.
  induction t as [|[n s] t IH]; intros i; simpl; [destruct i; simpl; intuition discriminate|].
  rewrite in_flat_map. split.
  - intros [x [X I]]. apply in_map_iff in I as [r [E R]]. subst. apply in_seq in X. apply IH in R. simpl.
    split; [lia|auto].
  - destruct i as [|x i]; simpl; [tauto|]. intros [L F]. exists x. split; [apply in_seq; lia|]. apply in_map, IH; auto.
Qed.
Definition elements (ts : list dims) :
  list element := flat_map (fun p => map (pair p) (indices (nth p ts []))) (seq 0 (length ts)).
Lemma elements_all ts e : In e (elements ts) <-> is_element ts e.
Proof.
  unfold elements, is_element. rewrite in_flat_map. destruct e as [p i]. simpl. split.
  - intros [q [Q I]]. apply in_map_iff in I as [j [E J]]. inversion E; subst. apply in_seq in Q.
    apply indices_all in J. split; [lia|auto].
  - intros [L F]. exists p. split; [apply in_seq; lia|]. apply in_map, indices_all; auto.
Qed.

Section Memory.
Variable V : Type.
Definition memory : Type := nat -> V.
Definition write (m : memory) (a : nat) (v : V) : memory := fun b => if Nat.eqb b a then v else m b.
Definition pack (ts : list dims) (value : element -> V) (m : memory) : memory :=
  fold_left (fun m e => write m (place ts e) (value e)) (elements ts) m.
Definition unpack (ts : list dims) (m : memory) (e : element) : V := m (place ts e).

Lemma written ts value l : Forall laid ts -> (forall e, In e l -> is_element ts e) -> forall m e, is_element ts e ->
  (In e l \/ unpack ts m e = value e) ->
    unpack ts (fold_left (fun m e => write m (place ts e) (value e)) l m) e = value e.
Proof.
  intros F. induction l as [|f l IH]; simpl; intros A m e E H; [tauto|]. apply IH; auto.
  destruct H as [[H|H]|H]; [subst|auto|]; right; unfold unpack, write in *.
  - rewrite Nat.eqb_refl. auto.
  - destruct (Nat.eqb_spec (place ts e) (place ts f)); auto. f_equal. symmetry. apply (places_differ ts); auto.
Qed.
(* C3: what was packed is what is unpacked, whatever the memory held before ... *)
Theorem unpack_after_pack ts value m e : Forall laid ts -> is_element ts e -> unpack ts (pack ts value m) e = value e.
Proof. intros F E. apply written; auto; [apply elements_all|left; apply elements_all; auto]. Qed.
(* ... and nothing of that is left. *)
Theorem no_place_is_stale ts value m n o : Forall laid ts -> o < numel ts -> pack ts value m o = pack ts value n o.
Proof.
  intros F L. destruct (every_place_is_used ts o F L) as [e [E <-]].
  pose proof (unpack_after_pack ts value m e F E) as A. pose proof (unpack_after_pack ts value n e F E) as B.
  unfold unpack in *. congruence.
Qed.
(* C4: so an all-reduce of flat tensors combines element (i, j) with element (i, j), whatever strides each rank has its
   own gradients in: [own] is a rank's memory, one for each gradient, and [strides] how each lies there,
     dense or not. *)
Definition mine (own : nat ->
  memory) (strides : list dims) (e : element) : V := own (fst e) (offset (snd e) (nth (fst e) strides [])).
Variable add : V -> V -> V. Variable zero : V.
Definition reduced (of_rank : list memory) (o : nat) : V := fold_right (fun m s => add (m o) s) zero of_rank.
Theorem same_element ts (ranks : list ((nat -> memory) * list dims * memory)) e : Forall laid ts -> is_element ts e ->
  unpack ts (reduced (map (fun r => let '(own, strides, junk) := r in pack ts (mine own strides) junk) ranks)) e
  = fold_right (fun r s => let '(own, strides, _) := r in add (mine own strides e) s) zero ranks.
Proof.
  intros F E. unfold unpack, reduced. induction ranks as [|[[own strides] junk] ranks IH]; simpl; auto.
  rewrite IH. f_equal. apply unpack_after_pack; auto.
Qed.
End Memory.
