// Package export converts the raft logs of stopped Trivet members to requests of the model in etcd's robustness suite.
// The suite does the same with etcd's own write-ahead log. It compares watches and reads of old revisions with these
// requests, and determines from them which of the writes without a response took effect.
//
// A member's log is copied to memory and opened there. The consensus package replays it from its first entry into an
// mvcc engine, so that this package does not depend on the file formats. Only entries up to the stored commit index are
// replayed, and the last batch of entries may be missing. A caller that needs the last write must therefore make some
// more writes after it. A log whose first entries were removed cannot be read; this happens after many entries, or when
// the member received a snapshot.
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

// Member identifies a stopped member and its data directory.
type Member struct {
	ID      uint64
	DataDir string
}

// Requests returns the requests in that member's log which has the most requests. Logs that cannot be read are skipped.
// If no log can be read, Requests returns an error.
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
		ID: m.ID, Members: ids, Dir: layout.RaftDir, FS: memory, Transport: discardTransport{}, Log: slog.New(slog.DiscardHandler), QuietLog: true,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	recorder := &recordingMachine{engine: engine}
	if _, err := host.AddGroup(consensus.GroupOptions{ID: layout.KVGroup, Name: layout.KVName, Machine: recorder}); err != nil {
		return nil, err
	}
	for !host.Idle() {
		if err := host.Process(); err != nil {
			return nil, err
		}
	}
	return recorder.requests, nil
}

// recordingMachine is a state machine that applies entries to an engine and collects their requests.
type recordingMachine struct {
	engine   *mvcc.Engine
	requests []model.EtcdRequest
}

var _ consensus.StateMachine = (*recordingMachine)(nil)

func (m *recordingMachine) Apply(entries []consensus.Entry) ([]any, error) {
	commands := make([]command.Command, len(entries))
	for i, e := range entries {
		commands[i] = command.Command{Index: e.Index, Term: e.Term, Data: bytes.Clone(e.Data)}
	}
	results, err := m.engine.Apply(commands)
	if err != nil {
		return nil, err
	}
	for i, e := range entries {
		if err := m.record(e, results[i]); err != nil {
			return nil, fmt.Errorf("entry %d: %w", e.Index, err)
		}
	}
	return make([]any, len(entries)), nil
}

// record converts the command in a log entry to a request and appends it to m.requests. It skips commands that the
// model does not have, and commands that changed nothing. The latter are commands with a conflict, which are proposed
// again, and commands that the engine refused. The model could not detect that a command with a conflict changed
// nothing.
func (m *recordingMachine) record(e consensus.Entry, r command.Result) error {
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

func (m *recordingMachine) Applied() (index, term uint64) {
	p := m.engine.Applied()
	return p.Index, p.Term
}

// Flush returns 0 as the index up to which entries are stored durably, so that the consensus package does not truncate
// the log.
func (m *recordingMachine) Flush() (uint64, error) { return 0, nil }

func (m *recordingMachine) Checkpoint(string) (uint64, uint64, error) {
	return 0, 0, errors.New("a log that is only read needs no checkpoint")
}

func (m *recordingMachine) Restore(string) error { return errors.New("the log begins with a snapshot") }

// discardTransport is a transport that discards all messages.
type discardTransport struct{}

func (discardTransport) Send(message.Envelope)                 {}
func (discardTransport) SendSnapshot(message.Envelope, string) {}
