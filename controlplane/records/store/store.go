// Package store keeps the platform's records: typed values in tables over one mvcc keyspace, read and changed by
// functions, agreed on by whatever Proposer stands behind it.
//
//   - View reads one consistent moment, as new as every write acknowledged before it began.
//   - Update runs a function that reads and writes; what it read becomes guards, what it wrote ops, and all of it is one
//     entry of the log or nothing. When something read has changed meanwhile the function runs again, so it must do
//     nothing but read and write through its Tx.
//   - Watch follows a table from a revision. A commit is the event: there is no other event mechanism. Shared makes what
//     many watches of one record need of an event, such as its message, once.
//   - Lists go by pages under tokens that cannot be forged and always show the moment of the first page.
//
// Time inside an Update is stamped once, max(last stamped, clock), and travels in the entry. Package storetest is the
// suite that every store passes: over memory, and over raft. It knows no service's records.
package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Proposer agrees on commands with the other members.
type Proposer interface {
	// Propose returns what came of a command once it is committed and applied here. The same id applies once.
	Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error)
	// ReadIndex returns when everything acknowledged before the call is applied here.
	ReadIndex(ctx context.Context) error
}

// Options of a Store.
type Options struct {
	// Engine holds the records; the Proposer applies to it. Required.
	Engine *mvcc.Engine
	// Proposer is required.
	Proposer Proposer
	// PageKey makes page tokens unforgeable; the same on all members. Required, 32 bytes.
	PageKey []byte
	// Stamp may add to an update that writes, before it is committed, on whose behalf it is. Optional.
	Stamp func(context.Context, *Tx)
	// Spend is called with the size of an update in bytes before the update is proposed. If it returns an error, the
	// update fails with that error and changes nothing. A retry after a conflict calls it again, because each attempt
	// is a log entry. Optional.
	Spend func(ctx context.Context, bytes int) error
	// Now is the clock; time.Now when nil.
	Now func() time.Time
	// Elapsed goes forward only, whatever becomes of the clock; when nil it is Now's, for a clock that nobody sets.
	Elapsed func() time.Duration
	// Rand draws proposal ids; crypto/rand when nil.
	Rand io.Reader
}

// Store is a set of tables.
type Store struct {
	opts Options
	// turn is held by an update that conflicted with another, so that such updates run one after the other and each
	// commits in the end.
	turn     chan struct{}
	inflight inflight
	// fresh is when this member last proved to be up to date, in nanoseconds of Elapsed; 0 when it never has.
	fresh atomic.Int64
	// freshening is held by the one whose proof serves all who wait for it.
	freshening chan struct{}
}

// New makes a store.
func New(opts Options) *Store {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Elapsed == nil {
		began, now := opts.Now(), opts.Now
		opts.Elapsed = func() time.Duration { return now().Sub(began) }
	}
	if opts.Rand == nil {
		opts.Rand = rand.Reader
	}
	return &Store{opts: opts, turn: make(chan struct{}, 1), inflight: inflight{keys: map[string]*flight{}}, freshening: make(chan struct{}, 1)}
}

// Revision is the newest revision applied here.
func (s *Store) Revision() int64 { return s.opts.Engine.Revision() }

// Barrier returns when everything acknowledged before the call can be read here.
func (s *Store) Barrier(ctx context.Context) error {
	asked := s.opts.Elapsed()
	if err := s.opts.Proposer.ReadIndex(ctx); err != nil {
		return err
	}
	s.fresh.Store(max(int64(asked), 1))
	return nil
}

// View runs f on one consistent moment that includes every write acknowledged before the call.
func (s *Store) View(ctx context.Context, f func(*View) error) error {
	if err := s.Barrier(ctx); err != nil {
		return err
	}
	return s.Local(f)
}

// Recent runs f on a moment that was the newest at most age ago. It asks the others only when this member has not
// proved to be up to date since then, and fails when it cannot.
func (s *Store) Recent(ctx context.Context, age time.Duration, f func(*View) error) error {
	if s.stale(age) {
		select {
		case s.freshening <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		var err error
		if s.stale(age) {
			err = s.Barrier(ctx)
		}
		<-s.freshening
		if err != nil {
			return err
		}
	}
	return s.Local(f)
}

func (s *Store) stale(age time.Duration) bool {
	fresh := s.fresh.Load()
	return fresh == 0 || int64(s.opts.Elapsed())-fresh > int64(age)
}

// Local runs f on whatever is applied here. It may be old.
func (s *Store) Local(f func(*View) error) error {
	snap := s.opts.Engine.Snapshot()
	defer snap.Close()
	return f(&View{snap: snap})
}

// Update runs f and commits what it did, and returns the revision of the commit. An error of f is returned as it is,
// and nothing has happened. The function may run several times.
//
// What commits stands on the newest records, or it would not. So does a refusal (a *fault.Fault), and an f that found
// nothing to do: other members may have applied, and answered by, what is not applied here yet.
func (s *Store) Update(ctx context.Context, f func(*Tx) error) (int64, error) {
	locked := false
	defer func() {
		if locked {
			<-s.turn
		}
	}()
	var own flight
	defer s.inflight.end(&own)
	for proven := false; ; {
		result, seen, busy, err := s.attempt(ctx, f, &own, locked)
		if _, refused := fault.From(err); !proven && seen != 0 && (refused || err == nil) {
			if err := s.Barrier(ctx); err != nil {
				return 0, err
			}
			if proven = true; s.opts.Engine.Revision() != seen {
				continue
			}
		}
		if err != nil {
			return 0, err
		}
		if !result.Conflict {
			return result.Revision, nil
		}
		if !locked {
			select {
			case s.turn <- struct{}{}:
				locked = true
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
		if busy != nil {
			select {
			case <-busy:
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
	}
}

// attempt runs an update once against the records of this member. If this member is behind, the guards of the update
// fail. If f failed or wrote nothing, seen is the revision that f read. If another proposal in flight would make the
// guards fail, attempt proposes nothing: the result is a conflict, and busy is closed when that proposal has ended.
func (s *Store) attempt(ctx context.Context, f func(*Tx) error, own *flight, locked bool) (result command.Result, seen int64, busy <-chan struct{}, err error) {
	if err := ctx.Err(); err != nil {
		return result, 0, nil, err
	}
	snap := s.opts.Engine.Snapshot()
	defer snap.Close()
	tx := &Tx{
		View: View{snap: snap, reads: &reads{seen: map[string]bool{}}, writes: map[string]write{}},
		now:  max(s.opts.Now().UnixMilli(), s.opts.Engine.LastTime()),
	}
	if err := f(tx); err != nil {
		return result, snap.Revision(), nil, err
	}
	if len(tx.writes) == 0 && tx.err == nil {
		// What was read was true at the snapshot, and Update sees to it that this was the newest.
		return command.Result{Revision: snap.Revision(), Time: tx.now}, snap.Revision(), nil, nil
	}
	if s.opts.Stamp != nil {
		s.opts.Stamp(ctx, tx)
	}
	if tx.err != nil {
		return result, 0, nil, tx.err
	}
	if busy := s.inflight.begin(own, tx, locked); busy != nil {
		return command.Result{Conflict: true}, 0, busy, nil
	}
	data, err := command.EncodeTxn(tx.txn())
	if err != nil {
		return result, 0, nil, fmt.Errorf("encode transaction: %w", err)
	}
	if s.opts.Spend != nil {
		if err := s.opts.Spend(ctx, len(data)); err != nil {
			return result, 0, nil, err
		}
	}
	var id [16]byte
	if _, err := io.ReadFull(s.opts.Rand, id[:]); err != nil {
		return result, 0, nil, fmt.Errorf("draw proposal id: %w", err)
	}
	result, err = s.opts.Proposer.Propose(ctx, id, data)
	s.inflight.end(own)
	if err != nil || result.Conflict {
		return result, 0, nil, err
	}
	return result, 0, nil, result.Err()
}

// Compact forgets the history before a revision: watches and pages from there fail from now on.
func (s *Store) Compact(ctx context.Context, revision int64) error {
	var id [16]byte
	if _, err := io.ReadFull(s.opts.Rand, id[:]); err != nil {
		return fmt.Errorf("draw proposal id: %w", err)
	}
	_, err := s.opts.Proposer.Propose(ctx, id, command.EncodeCompact(revision))
	return err
}

// Now is the time that an update beginning now would stamp.
func (s *Store) Now() cloud.Time {
	return max(s.opts.Now().UnixMilli(), s.opts.Engine.LastTime())
}

// history maps the engine's refusals of old revisions, also after a snapshot took the state's place, to what a caller
// can do about it.
func history(err error) error {
	if errors.Is(err, mvcc.ErrCompacted) || errors.Is(err, mvcc.ErrRestored) {
		return fault.New(fault.OutOfRange, "the history from there is no longer kept: read again").WithReason("HISTORY_EXPIRED").Because(err)
	}
	return err
}
