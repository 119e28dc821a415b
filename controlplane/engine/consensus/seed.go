package consensus

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// SeedGroup describes a group for Seed: its ID and the position of its state machine, which already has a state.
type SeedGroup struct {
	ID          uint64
	Index, Term uint64 // index and term of the state machine's last applied entry; zeros if it has none
	// Known is the highest term that the group has used before. The terms of the new log will be higher. If Known is
	// lower than Term, Term is used instead.
	Known uint64
}

// Seed creates the logs of a new data directory. The groups then begin with the existing states of their state
// machines, as if these were snapshots. Seed is used to create a cluster from a backup or from a surviving member.
//
// Seed must be called for each member in Options.Members, with the same states. When the members start for the first
// time, they record each other's data directories as in any new cluster (dirid.go). o has the same options as for Open,
// without Join. Seed returns an error if the directory already has a log.
func Seed(o Options, groups []SeedGroup) (err error) {
	o.Transport = discardTransport{}
	if err := o.ensureDefaults(); err != nil {
		return fmt.Errorf("seed consensus: %w", err)
	}
	if len(o.Members) == 0 {
		return errors.New("seed consensus: a cluster needs members")
	}
	dir := o.FS.PathJoin(o.Dir, "log")
	if _, err := o.FS.Stat(dir); err == nil {
		return fmt.Errorf("seed consensus: %s is there already", dir)
	}
	e, err := raftlog.OpenEngine(o.FS, dir, o.QuietLog, o.Log)
	if err != nil {
		return fmt.Errorf("seed consensus: %w", err)
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	b := e.NewBatch()
	defer b.Close()
	for _, g := range groups {
		term := max(g.Term, g.Known)
		if err := raftlog.Seed(e, b, g.ID, raftconf.Position{Index: g.Index, Term: g.Term}, term, o.Members); err != nil {
			return fmt.Errorf("seed group %d: %w", g.ID, err)
		}
	}
	return e.Commit(b)
}

// Salvage reads the log of a group and applies to the state machine m all entries that m has not applied yet, whether
// they were committed or not. So m then has every entry that this member has acknowledged, and perhaps some that no
// quorum has. No other process may use the data directory. Salvage returns the highest term in the log, which is the
// value for SeedGroup.Known.
func Salvage(o Options, group uint64, m StateMachine) (term uint64, err error) {
	o.Transport = discardTransport{}
	if err := o.ensureDefaults(); err != nil {
		return 0, fmt.Errorf("salvage group %d: %w", group, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("salvage group %d: %w", group, err)
		}
	}()
	dir := o.FS.PathJoin(o.Dir, "log")
	if _, err := o.FS.Stat(dir); err != nil {
		return 0, err
	}
	e, err := raftlog.OpenEngine(o.FS, dir, o.QuietLog, o.Log)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	l, fresh, err := raftlog.OpenExisting(e, group)
	if err != nil || fresh {
		return 0, errors.Join(err, errors.New("there is no log for it"))
	}
	index, _ := m.Applied()
	if index < l.Begin().Index && index < l.State().Index {
		return 0, fmt.Errorf("the state is at entry %d, but the log begins after %d", index, l.Begin().Index)
	}
	err = l.Scan(max(index, l.Begin().Index)+1, ^uint64(0), func(ent *raftpb.Entry) (bool, error) {
		if ent.GetType() != raftpb.EntryNormal || len(ent.Data) == 0 {
			return true, nil
		}
		list, err := decodeEntries(nil, ent)
		if err != nil {
			return false, err
		}
		if _, err := m.Apply(list); err != nil {
			return false, fmt.Errorf("apply entry %d: %w", ent.GetIndex(), err)
		}
		return true, nil
	})
	return max(l.Last().Term, l.HardState().GetTerm()), err
}

// discardTransport is a Transport that drops all envelopes. Seed and Salvage send nothing, but the options require a
// Transport.
type discardTransport struct{}

func (discardTransport) Send(message.Envelope)                 {}
func (discardTransport) SendSnapshot(message.Envelope, string) {}
