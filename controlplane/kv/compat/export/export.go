// Package export reads the log of stopped members of ours as the requests of etcd's robustness model, as that suite reads
// etcd's own write-ahead log. It is what the suite's checks of watches and of old reads compare with, and it tells which
// of the writes that were never answered took effect.
//
// A member's log is opened in memory, on a copy of its files, and replayed from its first entry by the consensus package
// itself into an engine of the mvcc package, so that this package knows neither's files. Only what the log's commit
// index covers is replayed, and that may be behind by the last batch: whoever wants the last write writes some more after it.
// A log that was cut, as a long life or a snapshot does it, cannot be read.
package export

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"

	"go.etcd.io/etcd/tests/v3/robustness/model"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Member is a member that has stopped.
type Member struct {
	ID      uint64
	DataDir string
}

// Requests reads the log of the member that has most of it. Those that cannot be read are passed over as long as one can.
func Requests(members []Member) ([]model.EtcdRequest, error) {
	var best []model.EtcdRequest
	var errs []error
	for _, m := range members {
		requests, err := read(m, members)
		if err != nil {
			errs = append(errs, fmt.Errorf("member %d: %w", m.ID, err))
		} else if len(requests) >= len(best) {
			best = requests
		}
	}
	if len(errs) == len(members) {
		return nil, errors.Join(errs...)
	}
	return best, nil
}

func read(m Member, all []Member) (_ []model.EtcdRequest, err error) {
	memory := vfs.NewMem()
	if ok, err := vfs.Clone(vfs.Default, memory, filepath.Join(m.DataDir, layout.RaftDir), layout.RaftDir); err != nil || !ok {
		return nil, errors.Join(errors.New("copy the log"), err)
	}
	engine, err := mvcc.Open(memory, "engine", mvcc.Options{Quiet: true})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	var ids []uint64
	for _, other := range all {
		ids = append(ids, other.ID)
	}
	host, err := consensus.Open(consensus.Options{
		ID: m.ID, Members: ids, Dir: layout.RaftDir, FS: memory, Transport: nowhere{}, Log: slog.New(slog.DiscardHandler), QuietLog: true,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	machine := &machine{engine: engine}
	if _, err := host.AddGroup(consensus.GroupOptions{ID: layout.KVGroup, Name: layout.KVName, Machine: machine}); err != nil {
		return nil, err
	}
	for !host.Idle() {
		if err := host.Process(); err != nil {
			return nil, err
		}
	}
	return machine.requests, nil
}

// machine replays entries and notes what they ask for.
type machine struct {
	engine   *mvcc.Engine
	requests []model.EtcdRequest
}

var _ consensus.StateMachine = (*machine)(nil)

func (m *machine) Apply(entries []consensus.Entry) ([]any, error) {
	commands := make([]command.Command, len(entries))
	for i, e := range entries {
		commands[i] = command.Command{Index: e.Index, Term: e.Term, Data: bytes.Clone(e.Data)}
	}
	results, err := m.engine.Apply(commands)
	if err != nil {
		return nil, err
	}
	for i, e := range entries {
		if err := m.note(e, results[i]); err != nil {
			return nil, fmt.Errorf("entry %d: %w", e.Index, err)
		}
	}
	return make([]any, len(entries)), nil
}

// note adds a request that the model knows. What was refused because others had gone before is proposed anew, and what
// is refused for itself changes nothing, but the model would not know of the first.
func (m *machine) note(e consensus.Entry, r command.Result) error {
	if len(e.Data) == 0 || r.Conflict || r.Refused != command.RefusedNot {
		return nil
	}
	p, compact, err := command.Explain(e.Data)
	if err != nil {
		return err
	}
	if p == nil {
		m.requests = append(m.requests, model.EtcdRequest{Type: model.Compact, Compact: &model.CompactRequest{Revision: compact}})
		return nil
	}
	request, err := translate(p.Steps)
	if err != nil || request == nil {
		return err
	}
	m.requests = append(m.requests, *request)
	return nil
}

func (m *machine) Applied() (index, term uint64) {
	p := m.engine.Applied()
	return p.Index, p.Term
}

// Flush says that nothing is kept, so that nothing is cut.
func (m *machine) Flush() (uint64, error) { return 0, nil }

func (m *machine) Checkpoint(string) (uint64, uint64, error) {
	return 0, 0, errors.New("no checkpoint is made of a log that is read")
}

func (m *machine) Restore(string) error { return errors.New("the log begins with a snapshot") }

// nowhere is a transport to nobody.
type nowhere struct{}

func (nowhere) Send(message.Envelope)                 {}
func (nowhere) SendSnapshot(message.Envelope, string) {}
