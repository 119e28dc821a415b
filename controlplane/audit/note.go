package audit

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/lead"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// Keep is how long a record is kept, in milliseconds, and maxRecords how many are.
	Keep       = int64(90 * 24 * 3600_000)
	maxRecords = 1_000_000
	// noteEvery is how often notes are written, maxNotes how many different ones then.
	noteEvery = time.Second
	maxNotes  = 50
	// writeTime is how long writing notes may take, lastTime when the member stops.
	writeTime = 10 * time.Second
	lastTime  = time.Second
	// maxText bounds a note's texts, in bytes.
	maxText = 512
	// pruneAtOnce bounds the records that a transaction removes.
	pruneAtOnce = 1000
)

// Options of the service.
type Options struct {
	Store    *store.Store
	Commands *lead.Commands
	Log      *slog.Logger
}

// Service is the audit of one member.
type Service struct {
	opts  Options
	write func(context.Context, []Record) (struct{}, error)

	mu    sync.Mutex
	notes map[kind]*Record
	order []kind
	// lost are notes of kinds that there was no room for.
	lost uint64
	// awake is signalled by the first note after a quiet time.
	awake chan struct{}
}

// kind is what makes notes alike.
type kind struct{ principal, method, outcome, address string }

// New makes the service and adds its command.
func New(opts Options) *Service {
	s := &Service{opts: opts, notes: map[kind]*Record{}, awake: make(chan struct{}, 1)}
	s.write = lead.Handle(opts.Commands, "audit.write", lead.Once, s.doWrite)
	return s
}

// Note has something written soon that changed no record. It never waits.
func (s *Service) Note(r Record) {
	r.ID, r.Message, r.Target = uuid.NewString(), cut(r.Message), cut(r.Target)
	k := kind{r.Principal, r.Method, r.Outcome, r.Address}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch like := s.notes[k]; {
	case like != nil:
		like.Suppressed++
	case len(s.notes) >= maxNotes:
		s.lost++
	default:
		s.notes[k] = &r
		s.order = append(s.order, k)
	}
	select {
	case s.awake <- struct{}{}:
	default:
	}
}

// cut bounds a text that a caller chose.
func cut(text string) string {
	if len(text) <= maxText {
		return text
	}
	return text[:maxText] + "…"
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
	batch := make([]Record, 0, len(s.order)+1)
	for _, k := range s.order {
		batch = append(batch, *s.notes[k])
	}
	if s.lost > 0 {
		batch = append(batch, Record{ID: uuid.NewString(), Outcome: "SUPPRESSED", Message: "too many different refusals at once", Suppressed: s.lost})
	}
	clear(s.notes)
	s.order, s.lost = nil, 0
	s.mu.Unlock()
	if len(batch) == 0 {
		return
	}
	if _, err := s.write(ctx, batch); err != nil {
		// The log has them at least.
		for _, r := range batch {
			s.opts.Log.Warn("not written to the audit", "err", err, "principal", r.Principal, "method", r.Method, "outcome", r.Outcome,
				"req", r.RequestID, "address", r.Address)
		}
	}
}

func (s *Service) doWrite(ctx context.Context, batch []Record) (struct{}, error) {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		for i := range batch {
			r := batch[i]
			r.At = tx.Now()
			records.Put(tx, &r, newestFirst(r.At), r.ID)
		}
		return nil
	})
	return struct{}{}, err
}

// Prune removes the records that are too old, and the oldest when there are too many. It is a leader's task.
func (s *Service) Prune(ctx context.Context) error {
	oldest := newestFirst(s.opts.Store.Now() - Keep)
	if last, err := s.last(); err != nil {
		return err
	} else if last != "" && last < oldest {
		oldest = last
	}
	for more := true; more; {
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			old, rest, err := records.ListAfter(tx.Unguarded(), pruneAtOnce, []string{oldest})
			if err != nil {
				return err
			}
			for _, r := range old {
				records.Delete(tx, r.Path...)
			}
			more = rest
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// last is the time, as in a path, of the last record that there is room for; empty when there is room for all.
func (s *Service) last() (at string, err error) {
	var after []string
	err = s.opts.Store.Local(func(v *store.View) error {
		for n := 0; n < maxRecords; n += pruneAtOnce {
			list := func() ([]store.Record[Record], bool, error) { return records.List(v, pruneAtOnce) }
			if after != nil {
				list = func() ([]store.Record[Record], bool, error) { return records.ListAfter(v, pruneAtOnce, after) }
			}
			page, more, err := list()
			if err != nil || !more {
				return err
			}
			after = page[len(page)-1].Path
		}
		at = after[0]
		return nil
	})
	return at, err
}

// Failed notes a call that was refused, or that was to change something and failed.
func (s *Service) Failed(c *cloud.Caller, outcome, message string) {
	r := Of(c)
	r.Outcome, r.Message = outcome, message
	s.Note(r)
}
