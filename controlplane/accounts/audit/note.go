package audit

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// Keep is how long audit records are stored, in milliseconds: 90 days.
	Keep = int64(90 * 24 * 3600_000)
	// noteEvery is the interval at which queued audit records (notes) are written. Each write contains at most
	// maxProvenNotes different notes of authenticated callers, and at most maxNotes of unauthenticated callers. Of the
	// former, at most maxNotesOf are of the same org, or of the same principal without an org.
	noteEvery      = time.Second
	maxProvenNotes = 200
	maxNotesOf     = 20
	maxNotes       = 50
	// writeTime is the timeout of one write of the queued notes. lastTime is the timeout of the last write, when the
	// member stops.
	writeTime = 10 * time.Second
	lastTime  = time.Second
)

// Options configures New. All fields except Audited are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Log      *slog.Logger
	// Audited is the counter in store.Options.Audited of Store. The metrics read it.
	Audited *atomic.Uint64
}

// Service writes, lists and prunes audit records on one member.
type Service struct {
	opts Options

	mu sync.Mutex
	// proven is the queue of notes about authenticated callers. claimed is the queue of notes about all other callers.
	proven, claimed notes
	// noted counts the calls of Note by outcome, and dropped the notes that the queues had no room for, since the member
	// started.
	noted   map[string]uint64
	dropped uint64
	// pruned is the time of the last call of Prune that read the records, or 0 if there was none. prunedAt is the
	// store's revision at that time.
	pruned   cloud.Time
	prunedAt int64
	// awake is signalled by every call of Note, and makes Run write the queued notes.
	awake chan struct{}
}

// notes is a queue of notes: audit records of calls that changed no stored data. Notes with the same principal, method,
// outcome and address are merged.
type notes struct {
	kinds map[kind]*Record
	order []kind
	// shares counts the queued notes of each org, or of each principal without an org.
	shares map[string]int
	// lost is the number of notes that were dropped because the queue was full.
	lost uint64
}

// kind identifies similar calls: notes with the same kind are merged into one record with a count.
type kind struct{ principal, method, outcome, address string }

// add queues the note r, or merges r with a queued note of the same kind k. The parameter share identifies the note's
// org, or its principal if there is no org. The parameter most is the maximum number of notes in the queue, and mostOf
// the maximum number with the same share. If a maximum is reached, add drops r, increments the field lost and returns
// false. Otherwise it returns true.
func (n *notes) add(r *Record, k kind, share string, most, mostOf int) bool {
	switch like := n.kinds[k]; {
	case like != nil:
		like.Suppressed++
	case len(n.kinds) >= most, n.shares[share] >= mostOf:
		n.lost++
		return false
	default:
		if n.kinds == nil {
			n.kinds, n.shares = map[kind]*Record{}, map[string]int{}
		}
		n.shares[share]++
		n.kinds[k] = r
		n.order = append(n.order, k)
	}
	return true
}

// take empties the queue and returns the notes that were in it. If notes were dropped, it appends a record with the
// number of dropped notes.
func (n *notes) take() (batch []Record) {
	for _, k := range n.order {
		batch = append(batch, *n.kinds[k])
	}
	if n.lost > 0 {
		batch = append(batch, Record{ID: uuid.NewString(), Outcome: suppressed, Message: "too many different ones at once", Suppressed: n.lost})
	}
	*n = notes{}
	return batch
}

// New returns a Service and registers its command with opts.Commands.
func New(opts Options) *Service {
	s := &Service{opts: opts, awake: make(chan struct{}, 1), noted: map[string]uint64{}}
	leader.Register(opts.Commands, s, writeCommand)
	return s
}

// Note queues a record of a call that changed no stored data. Run writes the record within about noteEvery. Note does
// not block.
func (s *Service) Note(r Record) {
	r.ID = uuid.NewString()
	r.clean()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noted[r.Outcome]++
	var queued bool
	if r.Principal != "" {
		share := "org " + string(r.Tenant.Org)
		if r.Tenant.Org == "" {
			share = "principal " + r.Principal
		}
		queued = s.proven.add(&r, kind{r.Principal, r.Method, r.Outcome, r.Address}, share, maxProvenNotes, maxNotesOf)
	} else {
		k := kind{outcome: r.Outcome, address: r.Address}
		// For logins and for calls of the etcd API the kind includes the method, so that these records are not merged
		// with other refusals.
		if strings.HasSuffix(r.Method, "/IssueToken") || strings.HasSuffix(r.Method, "/ExchangeToken") || strings.HasPrefix(r.Method, "/etcdserverpb.") {
			k.method = r.Method
		}
		queued = s.claimed.add(&r, k, "", maxNotes, maxNotes)
	}
	if !queued {
		s.dropped++
	}
	select {
	case s.awake <- struct{}{}:
	default:
	}
}

// Run writes the queued notes, at most once per noteEvery, until ctx ends. When ctx ends, Run writes the remaining
// notes with the timeout lastTime.
func (s *Service) Run(ctx context.Context) {
	for {
		select {
		case <-s.awake:
			s.flush(ctx, writeTime)
		case <-ctx.Done():
			s.flush(ctx, lastTime)
			return
		}
		// Wait for noteEvery, so that the notes that are queued meanwhile are written together.
		select {
		case <-time.After(noteEvery):
		case <-ctx.Done():
		}
	}
}

// flush writes the queued notes with the timeout limit. It continues if ctx is cancelled: flush has removed the notes
// from the queue, so they would be lost.
func (s *Service) flush(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	s.mu.Lock()
	batch := append(s.proven.take(), s.claimed.take()...)
	s.mu.Unlock()
	if len(batch) == 0 {
		return
	}
	if _, err := writeCommand.Call(ctx, s.opts.Commands, batch); err != nil {
		// The records could not be stored, so write them to the log instead.
		for _, r := range batch {
			s.opts.Log.Warn("not written to the audit", "err", err, "principal", r.Principal, "method", r.Method, "outcome", r.Outcome,
				"req", r.RequestID, "address", r.Address)
		}
	}
}

var writeCommand = leader.NewCommand("audit.write", leader.Once, (*Service).writeOnLeader)

// writeOnLeader stores the notes of a member in one transaction. The time of each stored record is the time of the
// transaction.
func (s *Service) writeOnLeader(ctx context.Context, batch []Record) (struct{}, error) {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		for i := range batch {
			r := batch[i]
			r.clean() // the sending member may run another version, which does not clean its records
			r.At = tx.Now()
			records.Put(tx, &r, newestFirst(r.At), r.ID)
		}
		return nil
	})
	return struct{}{}, err
}

// Failed queues a note of a call that was refused, or of a mutating call that failed.
func (s *Service) Failed(c *cloud.Caller, outcome, message string) {
	r := Of(c)
	r.Outcome, r.Message = outcome, message
	s.Note(r)
}

// Done queues a note of a call that succeeded and changed no stored data. Such a call has no transaction, so Stamp
// cannot add its record.
func (s *Service) Done(c *cloud.Caller) { s.Note(Of(c)) }
