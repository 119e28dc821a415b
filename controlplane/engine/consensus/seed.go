package consensus

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// SeedGroup is a group whose state machine holds a state already.
type SeedGroup struct {
	ID          uint64
	Index, Term uint64 // where the state machine is; zeroes if it is empty
	// Known is a term that was used; new terms are higher. 0 means Term.
	Known uint64
}

// Seed makes an empty directory one in which groups begin with the states that their state machines hold, as if a
// snapshot had been installed: for a cluster that is made of a backup, or of what is left of another. Every member of
// Options.Members does the same with the same states; Open then asks them to vouch for each other as at any first start.
// Options are those of Open, without Join.
func Seed(o Options, groups []SeedGroup) (err error) {
	o.Transport = nowhere{}
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

// Salvage applies to a state machine all that the group's log in the directory holds beyond it, whether a majority is
// known to have it or not: what this member acknowledged is there, and so may be what nobody did. The directory must not
// be in use. It returns the last term that was known there: whoever goes on from that must not fall behind it.
func Salvage(o Options, group uint64, m StateMachine) (term uint64, err error) {
	o.Transport = nowhere{}
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
		return 0, errors.Join(err, errors.New("there is no log of it"))
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

// nowhere is the transport of a directory that is not driven.
type nowhere struct{}

func (nowhere) Send(message.Envelope)                 {}
func (nowhere) SendSnapshot(message.Envelope, string) {}
