package node

import (
	"context"
	"encoding/hex"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Ban is the record of a banned host key, at node-ban/<SHA-256 of the public key, hex>. Every call and join with the
// key is refused. The VMs that are placed on the host stay placed there.
type Ban struct {
	Key string
	// Node and Name are the ID and name of the host that had the key when the key was banned. Both are empty if no host
	// had it.
	Node   cloud.NodeID
	Name   string
	Reason string
	At     cloud.Time
}

var bans = store.NewTable[Ban]("node-ban")

const (
	maxBans   = 10_000
	maxReason = 256
)

func errBanned() *fault.Fault {
	return fault.New(fault.PermissionDenied, "this host is banned: its key is refused until `trivet host unban`").WithReason(ReasonBanned)
}

// checkBan returns the errBanned error if key, the SHA-256 of a public key, is banned.
func checkBan(r store.Reader, key []byte) error {
	banned, err := bans.Has(r, keyText(key))
	if err == nil && banned && !mutant.On(mutant.IgnoreBans) {
		return errBanned()
	}
	return err
}

// banRequest identifies a host by Node or by Key; exactly one of the two is set.
type banRequest struct {
	Node   cloud.NodeID
	Key    string
	Reason string
}

func (q *banRequest) check() error {
	switch {
	case (q.Node == "") == (q.Key == ""):
		return fault.Invalid("node_id", "give a node or a key")
	case q.Node != "":
		return cloud.CheckUUID("node_id", string(q.Node))
	}
	if sum, err := hex.DecodeString(q.Key); err != nil || len(sum) != 32 || keyText(sum) != q.Key {
		return fault.Invalid("key", "must be 64 digits of 0-9 and a-f: the SHA-256 of a public key")
	}
	return nil
}

// Ban bans the key of a host and cordons the host. The host is given by its ID or by the SHA-256 of its public key in
// hex; the other argument is empty. Ban keeps the host's record and the placement of its VMs. If the key is already
// banned, the old ban keeps its reason and time. Ban returns the bans of the host's keys. The caller must already be
// authorized.
func (s *Service) Ban(ctx context.Context, id cloud.NodeID, key, reason string) ([]Ban, error) {
	q := banRequest{id, key, reason}
	if err := q.check(); err != nil {
		return nil, err
	}
	if len(reason) > maxReason || !printable(reason) {
		return nil, fault.Invalid("reason", "must be at most %d printable bytes", maxReason)
	}
	return banCommand.Call(ctx, s.opts.Commands, q)
}

var banCommand = leader.NewCommand("node.ban", leader.Repeatable, (*Service).banOnLeader)

// banOnLeader implements Ban on the leader. It returns one ban per key of the host, including bans that already
// existed.
func (s *Service) banOnLeader(ctx context.Context, q banRequest) (made []Ban, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		made = nil
		keys, id := []string{q.Key}, q.Node
		if id == "" {
			if holder, err := hostKeys.Get(tx, q.Key); err != nil {
				return err
			} else if holder != nil {
				id = *holder
			}
		} else if keys, err = keysOf(tx, id); err != nil {
			return err
		}
		n := &cloud.Node{}
		if id != "" {
			have, err := Nodes.Get(tx, string(id))
			if err != nil {
				return err
			}
			if have == nil && q.Node != "" {
				return noNode(id)
			}
			if have != nil {
				n = have
			}
		}
		if len(keys) == 0 {
			return fault.New(fault.FailedPrecondition, "the key of node %s is not recorded: the host has not connected since keys are recorded; evict it instead", id)
		}
		if all, more, err := bans.List(tx.Unguarded(), maxBans); err != nil {
			return err
		} else if more || len(all) == maxBans {
			return fault.New(fault.ResourceExhausted, "there are %d bans: remove some", maxBans)
		}
		for _, key := range keys {
			b, err := bans.Get(tx, key)
			if err != nil {
				return err
			}
			if b == nil {
				b = &Ban{Key: key, Node: n.ID, Name: n.Name, Reason: q.Reason, At: tx.Now()}
				bans.Put(tx, b, key)
			}
			made = append(made, *b)
		}
		if n.ID == "" || n.Cordoned {
			return nil
		}
		n.Cordoned, n.UpdatedAt = true, tx.Now()
		Nodes.Put(tx, n, string(n.ID))
		return nil
	})
	return made, err
}

// Unban removes the bans of all keys of a host, given by its ID, or the ban of one key. The other argument is empty. It
// returns NotFound if there is no such ban.
func (s *Service) Unban(ctx context.Context, id cloud.NodeID, key string) error {
	q := banRequest{Node: id, Key: key}
	if err := q.check(); err != nil {
		return err
	}
	_, err := unbanCommand.Call(ctx, s.opts.Commands, q)
	return err
}

var unbanCommand = leader.NewCommand("node.unban", leader.Once, (*Service).unbanOnLeader)

// unbanOnLeader implements Unban on the leader.
func (s *Service) unbanOnLeader(ctx context.Context, q banRequest) (none struct{}, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, _, err := bans.List(tx, 0)
		if err != nil {
			return err
		}
		found := false
		for _, r := range all {
			if q.Key != "" && r.Path[0] == q.Key || q.Node != "" && r.Value.Node == q.Node {
				bans.Delete(tx, r.Path...)
				found = true
			}
		}
		if !found {
			return fault.New(fault.NotFound, "no such ban: `trivet host bans` lists them")
		}
		return nil
	})
	return none, err
}

// Bans returns one page of all bans, and the token of the next page.
func (s *Service) Bans(ctx context.Context, size int32, token string) ([]*Ban, string, error) {
	all := func(*Ban) bool { return true }
	return store.Page(ctx, s.opts.Store, bans, store.PageRequest{Size: size, Token: token, Query: "bans"}, all)
}
