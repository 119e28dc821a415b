package consensus

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// SeedGroup describes a group whose state machine already has a state.
type SeedGroup struct {
	ID          uint64
	Index, Term uint64 // index and term of the state machine's last applied entry; zeros if it has none
	// Known is the highest term that was used before. The new log's terms are higher. 0 means Term.
	Known uint64
}

// Seed creates the logs of a new data directory, in which groups begin with the existing states of their state
// machines, as if a snapshot had been installed. It is for a cluster that is created from a backup or from a surviving
// member. Every member of Options.Members must be seeded with the same states. At the first start the members record
// each other's data directories as in any new cluster (dirid.go). o has the options of Open, without Join. Seed fails
// if the directory has a log already.
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

// Salvage opens the group's log in the data directory and applies to m all entries after m's last applied one, whether
// they were committed or not. So the state has every entry that this member acknowledged, and perhaps entries that no
// quorum acknowledged. The directory must not be in use. Salvage returns the highest term in the log, for
// SeedGroup.Known.
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

// discardTransport is a Transport that drops all envelopes. Seed and Salvage, which send nothing, need it for the
// options.
type discardTransport struct{}

func (discardTransport) Send(message.Envelope)                 {}
func (discardTransport) SendSnapshot(message.Envelope, string) {}
