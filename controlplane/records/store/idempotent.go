package store

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of stored answers.
const (
	// KeepAnswers is how long an answer can be replayed, in milliseconds.
	KeepAnswers = 24 * 3600_000
	// MaxAnswers is the most answers that are kept per Place. A new answer then replaces the oldest.
	MaxAnswers = 10_000
)

type answer struct {
	Body   [32]byte
	Answer []byte
	At     cloud.Time
	// Turn is the answer's sequence number within its place.
	Turn uint64
}

// sequence holds the sequence numbers of a place's answers: First (inclusive) to Next (exclusive) are stored, and those
// below Forgotten are ignored.
type sequence struct {
	First, Next uint64
	Forgotten   uint64 `cbor:",omitempty"`
}

var (
	answers     = NewTable[answer]("idem")
	answerOrder = NewTable[string]("idem-order")
	answerTurns = NewTable[sequence]("idem-turns")
)

// Place identifies the project, org or principal that stored answers belong to. Each place has MaxAnswers of its own. A
// project and an org with the same ID are different places.
type Place struct{ kind, id string }

// InProject returns the place of calls about a project, InOrg of calls about an org, and OfPrincipal of calls about
// neither.
func InProject(id cloud.ProjectID) Place { return Place{"project", string(id)} }
func InOrg(id cloud.OrgID) Place         { return Place{"org", string(id)} }
func OfPrincipal(name string) Place      { return Place{"identity", name} }

// path returns the place as a part of the answers' keys.
func (p Place) path() string { return p.kind + ":" + p.id }

// legacyPath returns the key part that earlier versions used, which did not distinguish projects from orgs.
func (p Place) legacyPath() string {
	switch {
	case p.kind == "identity":
		return p.path()
	case p.id == "":
		return "-"
	}
	return p.id
}

// Idempotent runs do and stores its answer under the place, the caller, the method and the idempotency key. For
// KeepAnswers, a repeated call with the same body does not run do: it returns the stored answer and replayed set to
// true, even if the resource no longer exists. A repeated call with another body gets InvalidArgument. Without a key
// Idempotent only runs do. If do fails, nothing is stored.
func Idempotent[A any](tx *Tx, caller *cloud.Caller, at Place, method string, body [32]byte, do func() (A, error)) (out A, replayed bool, err error) {
	if caller == nil || caller.IdempotencyKey == "" {
		out, err = do()
		return out, false, err
	}
	place := at.path()
	sum := sha256.Sum256([]byte(caller.Name() + "\x00" + method + "\x00" + caller.IdempotencyKey))
	id := hex.EncodeToString(sum[:16])
	stored, err := answers.Get(tx, place, id)
	if err != nil {
		return out, false, err
	}
	previous, previousAt := stored, place
	if previous == nil {
		// Look for an answer of an earlier version, whose place has no kind. Its ID covers the method, and each method
		// has one kind.
		previousAt = at.legacyPath()
		if previous, err = answers.Get(tx, previousAt, id); err != nil {
			return out, false, err
		}
	}
	current, err := previous.current(tx, previousAt)
	if err != nil {
		return out, false, err
	}
	if current {
		if previous.Body != body {
			return out, false, fault.Invalid("idempotency-key", "was used before with another request").WithReason("IDEMPOTENCY_KEY_REUSED")
		}
		if err := cbor.Unmarshal(previous.Answer, &out); err != nil {
			return out, false, fmt.Errorf("decode kept answer: %w", err)
		}
		return out, true, nil
	}
	if out, err = do(); err != nil {
		return out, false, err
	}
	text, err := cbor.Marshal(out)
	if err != nil {
		return out, false, fmt.Errorf("encode answer: %w", err)
	}
	return out, false, remember(tx, place, id, answer{Body: body, Answer: text, At: tx.Now()}, stored)
}

// current reports whether an answer is still valid: not nil, younger than KeepAnswers and not forgotten.
func (a *answer) current(tx *Tx, place string) (bool, error) {
	if a == nil || tx.Now()-a.At >= KeepAnswers {
		return false, nil
	}
	t, err := answerTurns.Get(tx, place)
	return err == nil && (t == nil || a.Turn >= t.Forgotten), err
}

// ForgetPlace makes Idempotent ignore every answer that is stored for a place now, because the ID is used for a new
// project or org. The answers are deleted when they are older than KeepAnswers.
func ForgetPlace(tx *Tx, place Place) error {
	for _, path := range []string{place.path(), place.legacyPath()} {
		t, err := answerTurns.Get(tx, path)
		if err != nil {
			return err
		}
		if t == nil {
			continue
		}
		t.Forgotten = t.Next
		answerTurns.Put(tx, t, path)
	}
	return nil
}

// remember stores an answer as the newest of its place, and removes the oldest ones beyond MaxAnswers.
func remember(tx *Tx, place, id string, a answer, replaces *answer) error {
	t, err := answerTurns.Get(tx, place)
	if err != nil {
		return err
	}
	if t == nil {
		t = &sequence{}
	}
	if replaces != nil {
		answerOrder.Delete(tx, place, sequenceKey(replaces.Turn))
	}
	a.Turn = t.Next
	t.Next++
	answers.Put(tx, &a, place, id)
	answerOrder.Put(tx, &id, place, sequenceKey(a.Turn))
	for t.Next-t.First > MaxAnswers {
		if err := forget(tx, place, t); err != nil {
			return err
		}
	}
	answerTurns.Put(tx, t, place)
	return nil
}

// forget removes the oldest answer.
func forget(tx *Tx, place string, t *sequence) error {
	id, err := answerOrder.Get(tx, place, sequenceKey(t.First))
	if err != nil {
		return err
	}
	if id != nil {
		answers.Delete(tx, place, *id)
		answerOrder.Delete(tx, place, sequenceKey(t.First))
	}
	t.First++
	return nil
}

func sequenceKey(n uint64) string { return fmt.Sprintf("%016x", n) }

// ForgetAnswers removes up to limit answers that are older than KeepAnswers, and the sequence numbers of places without
// answers. more reports whether there may be more to remove.
func ForgetAnswers(tx *Tx, limit int) (more bool, err error) {
	places, _, err := answerTurns.List(tx.Unguarded(), 0)
	if err != nil {
		return false, err
	}
	for _, p := range places {
		place := p.Path[0]
		t, err := answerTurns.Get(tx, place)
		if err != nil || t == nil {
			return false, err
		}
		first := t.First
		for t.First < t.Next {
			if limit == 0 {
				answerTurns.Put(tx, t, place)
				return true, nil
			}
			old, err := expired(tx, place, t.First)
			if err != nil {
				return false, err
			}
			if !old {
				break
			}
			if err := forget(tx, place, t); err != nil {
				return false, err
			}
			limit--
		}
		switch {
		case t.First == t.Next:
			if limit == 0 {
				answerTurns.Put(tx, t, place)
				return true, nil
			}
			// The numbers of the place start again at 0, and Forgotten is lost. This makes no forgotten answer valid
			// again, because the place has no answers: every answer has a number from First up to Next.
			answerTurns.Delete(tx, place)
			limit--
		case t.First != first:
			answerTurns.Put(tx, t, place)
		}
	}
	return false, nil
}

func expired(tx *Tx, place string, n uint64) (bool, error) {
	id, err := answerOrder.Get(tx, place, sequenceKey(n))
	if err != nil || id == nil {
		return id == nil, err
	}
	a, err := answers.Get(tx, place, *id)
	if err != nil || a == nil {
		return a == nil, err
	}
	return tx.Now()-a.At >= KeepAnswers, nil
}
