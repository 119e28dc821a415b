package store

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Limits of the responses that Idempotent stores:
const (
	// KeepAnswers is how long a stored response is returned to repeated calls, in milliseconds.
	KeepAnswers = 24 * 3600_000
	// MaxAnswers is the maximum number of responses that are stored per project, org or principal (Place). When it is
	// reached, a new response replaces the oldest.
	MaxAnswers = 10_000
)

type answer struct {
	Body   [32]byte
	Answer []byte
	At     cloud.Time
	// Turn is the response's sequence number within its Place.
	Turn uint64
}

// sequence holds the sequence numbers of the responses that are stored for one Place: First (inclusive) to Next
// (exclusive). Responses with numbers below Forgotten are ignored.
type sequence struct {
	First, Next uint64
	Forgotten   uint64 `cbor:",omitempty"`
}

var (
	answers     = NewTable[answer]("idem")
	answerOrder = NewTable[string]("idem-order")
	answerTurns = NewTable[sequence]("idem-turns")
)

// Place identifies the project, org or principal to which stored responses belong. MaxAnswers applies to each Place. A
// project and an org with the same ID are different places.
type Place struct{ kind, id string }

// InProject returns the Place of calls about a project. InOrg returns that of calls about an org, and OfPrincipal that
// of calls about neither.
func InProject(id cloud.ProjectID) Place { return Place{"project", string(id)} }
func InOrg(id cloud.OrgID) Place         { return Place{"org", string(id)} }
func OfPrincipal(name string) Place      { return Place{"identity", name} }

// path returns the first part of the keys under which the place's responses are stored.
func (p Place) path() string { return p.kind + ":" + p.id }

// legacyPath returns the path that earlier versions used for the place. They did not distinguish projects from orgs.
func (p Place) legacyPath() string {
	switch {
	case p.kind == "identity":
		return p.path()
	case p.id == "":
		return "-"
	}
	return p.id
}

// Idempotent runs do and stores the response under the place, the caller, the method and the idempotency key. For
// KeepAnswers afterwards, a call with the same key and body does not run do: Idempotent returns the stored response
// with replayed set to true, even if the resource no longer exists. A call with the same key and another body gets
// InvalidArgument. Without a key Idempotent only runs do. If do fails, nothing is stored.
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
		// Earlier versions stored responses under the ID of a project or org, without its kind. The ID of the response
		// covers the method, and each method belongs to one kind of place. So the ID of the response identifies the
		// call there too.
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
	if mutant.On(mutant.ForgetAnswers) {
		return out, false, nil
	}
	return out, false, remember(tx, place, id, answer{Body: body, Answer: text, At: tx.Now()}, stored)
}

// current reports whether Idempotent may return the stored response a. It may if a is not nil, is younger than
// KeepAnswers, and was not invalidated by ForgetPlace.
func (a *answer) current(tx *Tx, place string) (bool, error) {
	if a == nil || tx.Now()-a.At >= KeepAnswers {
		return false, nil
	}
	t, err := answerTurns.Get(tx, place)
	return err == nil && (t == nil || a.Turn >= t.Forgotten), err
}

// ForgetPlace makes Idempotent ignore every response that is stored for the place now. Call it when an ID is reused for
// a new project or org. ForgetAnswers later deletes the responses, when they are older than KeepAnswers.
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

// remember stores the response a as the newest of its place and deletes the oldest responses beyond MaxAnswers. The
// parameter replaces is the response that was stored before under the same ID, or nil.
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

// forget deletes the oldest response of a place and advances t.First.
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

// ForgetAnswers deletes up to limit responses that are older than KeepAnswers. It also deletes the counter of each place
// that has no response any more. more reports whether there may be more to delete.
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
			// This also deletes Forgotten, and the sequence numbers of the place start again at 0. No forgotten
			// response becomes valid again: each response has a number from First up to Next, so the place has no
			// responses left.
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
