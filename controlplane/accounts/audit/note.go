package audit

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// Keep is how long a record is kept, in milliseconds.
	Keep = int64(90 * 24 * 3600_000)
	// noteEvery is how often notes are written. At most maxProvenNotes different ones of authenticated callers are written
	// then, maxNotesOf of them of one org (of one principal without an org), and maxNotes of unauthenticated callers.
	noteEvery      = time.Second
	maxProvenNotes = 200
	maxNotesOf     = 20
	maxNotes       = 50
	// writeTime is how long writing notes may take, lastTime when the member stops.
	writeTime = 10 * time.Second
	lastTime  = time.Second
)

// Options of the service.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Log      *slog.Logger
}

// Service is the audit of one member.
type Service struct {
	opts Options

	mu sync.Mutex
	// proven are notes of those who proved who they are, claimed of the others.
	proven, claimed notes
	// pruned is the time of the last Prune that read the records, 0 for none, and prunedAt the store's revision at that
	// time.
	pruned   cloud.Time
	prunedAt int64
	// awake is signalled by the first note after a quiet time.
	awake chan struct{}
}

// notes wait to be written, like ones together.
type notes struct {
	kinds map[kind]*Record
	order []kind
	// shares counts the notes of each org, or of each principal without one.
	shares map[string]int
	// lost are those of kinds that there was no room for.
	lost uint64
}

// kind is what makes notes alike.
type kind struct{ principal, method, outcome, address string }

// add adds a note, or counts it with one like it. It counts the note as lost when there are most others already, or mostOf
// others of the same share.
func (n *notes) add(r *Record, k kind, share string, most, mostOf int) {
	switch like := n.kinds[k]; {
	case like != nil:
		like.Suppressed++
	case len(n.kinds) >= most, n.shares[share] >= mostOf:
		n.lost++
	default:
		if n.kinds == nil {
			n.kinds, n.shares = map[kind]*Record{}, map[string]int{}
		}
		n.shares[share]++
		n.kinds[k] = r
		n.order = append(n.order, k)
	}
}

// take empties the notes.
func (n *notes) take() (batch []Record) {
	for _, k := range n.order {
		batch = append(batch, *n.kinds[k])
	}
	if n.lost > 0 {
		batch = append(batch, Record{ID: uuid.NewString(), Outcome: "SUPPRESSED", Message: "too many different ones at once", Suppressed: n.lost})
	}
	*n = notes{}
	return batch
}

// New makes the service and registers its command.
func New(opts Options) *Service {
	s := &Service{opts: opts, awake: make(chan struct{}, 1)}
	leader.Register(opts.Commands, s, writeCommand)
	return s
}

// Note has something written soon that changed no record. It never waits.
func (s *Service) Note(r Record) {
	r.ID = uuid.NewString()
	r.clean()
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Principal != "" {
		share := "org " + string(r.Tenant.Org)
		if r.Tenant.Org == "" {
			share = "principal " + r.Principal
		}
		s.proven.add(&r, kind{r.Principal, r.Method, r.Outcome, r.Address}, share, maxProvenNotes, maxNotesOf)
	} else {
		k := kind{outcome: r.Outcome, address: r.Address}
		// The method is in the key of refused logins and of refused changes of the cluster or of etcd's users, so that
		// these records are not merged with other refusals.
		if strings.HasSuffix(r.Method, "/IssueToken") || strings.HasSuffix(r.Method, "/ExchangeToken") || strings.HasPrefix(r.Method, "/etcdserverpb.") {
			k.method = r.Method
		}
		s.claimed.add(&r, k, "", maxNotes, maxNotes)
	}
	select {
	case s.awake <- struct{}{}:
	default:
	}
}

// Run writes notes until ctx ends, and then what is left.
func (s *Service) Run(ctx context.Context) {
	for {
		select {
		case <-s.awake:
			s.flush(ctx, writeTime)
		case <-ctx.Done():
			s.flush(ctx, lastTime)
			return
		}
		// Those that come meanwhile are written together.
		select {
		case <-time.After(noteEvery):
		case <-ctx.Done():
		}
	}
}

// flush writes what was noted. It goes on when ctx ends: what was taken from the notes is in it.
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
		// The log has them at least.
		for _, r := range batch {
			s.opts.Log.Warn("not written to the audit", "err", err, "principal", r.Principal, "method", r.Method, "outcome", r.Outcome,
				"req", r.RequestID, "address", r.Address)
		}
	}
}

var writeCommand = leader.NewCommand("audit.write", leader.Once, (*Service).writeOnLeader)

// writeOnLeader stores the notes of a member, with the time of the store.
func (s *Service) writeOnLeader(ctx context.Context, batch []Record) (struct{}, error) {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		for i := range batch {
			r := batch[i]
			r.clean() // another member may be of another version
			r.At = tx.Now()
			records.Put(tx, &r, newestFirst(r.At), r.ID)
		}
		return nil
	})
	return struct{}{}, err
}

// Failed notes a call that was refused, or that was to change something and failed.
func (s *Service) Failed(c *cloud.Caller, outcome, message string) {
	r := Of(c)
	r.Outcome, r.Message = outcome, message
	s.Note(r)
}

// Done notes a call that was carried out and wrote nothing that Stamp could be added to.
func (s *Service) Done(c *cloud.Caller) { s.Note(Of(c)) }
