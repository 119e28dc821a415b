// Package store keeps the platform's records: typed values in tables over one mvcc keyspace. Updates are replicated as
// log entries through a Proposer. The main types are Store, Table, View and Tx.
//
//   - View reads a consistent snapshot that includes every write acknowledged before the call.
//   - Update runs a function that reads and writes through a Tx. The reads become guards and the writes become
//     operations of a single log entry, which is applied atomically. If a record that the function read
//     has changed meanwhile, Update runs the function again, so the function must have no side effects outside its Tx.
//   - Watch returns the changes of a table from a revision on. There is no other event mechanism. Shared derives a
//     value, such as an encoded message, from a change once for all watches of the record.
//   - Lists are paged. Page tokens are authenticated with a key, and all pages show the revision of the first page.
//
// The time of an Update is max(time of the last applied update, clock). It is part of the log entry, so that it is the
// same on all members.
//
// Package storetest is the test suite for stores; it runs over memory and over raft. Package store must not know the
// records of any service.
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

// Proposer replicates log entries to all members.
type Proposer interface {
	// Propose replicates a command and returns its result once it is committed and applied on this member. A command
	// that is proposed again with the same id is applied only once.
	Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error)
	// ReadIndex returns once every write that was acknowledged before the call is applied on this member.
	ReadIndex(ctx context.Context) error
}

// Options configures a Store.
type Options struct {
	// Engine holds the records. The Proposer must apply committed commands to this engine. Required.
	Engine *mvcc.Engine
	// Proposer replicates the store's log entries. Required.
	Proposer Proposer
	// PageKey authenticates page tokens (HMAC-SHA256). It must be the same on all members. Required, 32 bytes.
	PageKey []byte
	// Stamp is called with each update that writes, before the update is proposed. It may add records to the update,
	// such as one about the caller. Optional.
	Stamp func(context.Context, *Tx)
	// Audited is the total number of calls of Tx.CountAudited in updates that this member has committed. Optional.
	Audited *atomic.Uint64
	// Spend is called with the size of an update in bytes before the update is proposed. If it returns an error, the
	// update fails with that error and changes nothing. A retry after a conflict calls it again, because each attempt
	// is a log entry. Optional.
	Spend func(ctx context.Context, bytes int) error
	// Now is the clock; time.Now when nil.
	Now func() time.Time
	// Elapsed is a monotonic clock. When nil it is derived from Now, which must then never be set back.
	Elapsed func() time.Duration
	// Rand is the source of proposal IDs; crypto/rand when nil.
	Rand io.Reader
}

// Store reads and updates the platform's records. Its methods may be called concurrently.
type Store struct {
	opts Options
	// turn is a semaphore of size 1 for updates that had a conflict. Such updates run one at a time, so that each of
	// them commits eventually.
	turn     chan struct{}
	inflight inflight
	// fresh is the time at which the last successful Barrier began, in nanoseconds of Elapsed; 0 before the first one.
	fresh atomic.Int64
	// freshening is a semaphore of size 1. It makes concurrent calls of Recent share one call of Barrier.
	freshening chan struct{}
}

// New returns a Store with the given options; it does not check that the required ones are set.
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

// Revision returns the newest revision of the records that is applied on this member.
func (s *Store) Revision() int64 { return s.opts.Engine.Revision() }

// Barrier returns once every write that was acknowledged before the call can be read on this member.
func (s *Store) Barrier(ctx context.Context) error {
	asked := s.opts.Elapsed()
	if err := s.opts.Proposer.ReadIndex(ctx); err != nil {
		return err
	}
	s.fresh.Store(max(int64(asked), 1))
	return nil
}

// View runs f on a snapshot that includes every write acknowledged before the call.
func (s *Store) View(ctx context.Context, f func(*View) error) error {
	if err := s.Barrier(ctx); err != nil {
		return err
	}
	return s.Local(f)
}

// Recent runs f on a snapshot that includes every write acknowledged longer ago than the given age. It calls Barrier
// only if the last successful Barrier began longer ago than that, and fails if Barrier fails.
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

// Local runs f on a snapshot of the records that are applied on this member. The snapshot may lack newer writes that
// other members have acknowledged.
func (s *Store) Local(f func(*View) error) error {
	snap := s.opts.Engine.Snapshot()
	defer snap.Close()
	return f(&View{snap: snap})
}

// Update runs f, commits the writes that f made through its Tx, and returns the revision of the commit. If f returns an
// error, Update returns that error unchanged and writes nothing. f may run several times.
//
// If f has read outdated records, its writes fail as a conflict and f runs again. Two results have no writes that could
// fail: a refusal (f returned a *fault.Fault), and an update without writes. Before Update returns such a result, it
// calls Barrier, and it runs f again if the revision has changed.
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

// attempt runs an update once against the records that are applied on this member. If these records are outdated, the
// guards of the update fail and the result is a conflict. If f failed or wrote nothing, seen is the revision that f
// read. If another running proposal would make the guards fail, attempt proposes nothing. The result is then a
// conflict, and the channel busy is closed when that proposal has ended.
func (s *Store) attempt(ctx context.Context, f func(*Tx) error, own *flight, locked bool) (result command.Result, seen int64, busy <-chan struct{}, err error) {
	if err := ctx.Err(); err != nil {
		return result, 0, nil, err
	}
	snap := s.opts.Engine.Snapshot()
	defer snap.Close()
	tx := &Tx{
		View: View{snap: snap, reads: &reads{seen: map[string]bool{}}, writes: map[string]write{}, names: names{}},
		now:  max(s.opts.Now().UnixMilli(), s.opts.Engine.LastTime()),
	}
	if err := f(tx); err != nil {
		return result, snap.Revision(), nil, err
	}
	if len(tx.writes) == 0 && tx.err == nil {
		// Update calls Barrier before it returns this result, to ensure that the snapshot was current.
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
	err = result.Err()
	if err == nil && s.opts.Audited != nil {
		s.opts.Audited.Add(tx.audited)
	}
	return result, 0, nil, err
}

// Compact removes the history before a revision. Watches and page tokens that need an earlier revision then fail.
func (s *Store) Compact(ctx context.Context, revision int64) error {
	var id [16]byte
	if _, err := io.ReadFull(s.opts.Rand, id[:]); err != nil {
		return fmt.Errorf("draw proposal id: %w", err)
	}
	_, err := s.opts.Proposer.Propose(ctx, id, command.EncodeCompact(revision))
	return err
}

// Now returns the time that an update would get if it began now, in Unix milliseconds.
func (s *Store) Now() cloud.Time {
	return max(s.opts.Now().UnixMilli(), s.opts.Engine.LastTime())
}

// history turns the engine's errors for revisions that are no longer available (compacted, or replaced by a snapshot)
// into an OutOfRange fault.
func history(err error) error {
	if errors.Is(err, mvcc.ErrCompacted) || errors.Is(err, mvcc.ErrRestored) {
		return fault.New(fault.OutOfRange, "the history from there is no longer kept: read again").WithReason("HISTORY_EXPIRED").Because(err)
	}
	return err
}
