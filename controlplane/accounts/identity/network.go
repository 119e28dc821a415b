package identity

import (
	"context"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// maxNetworks is the maximum number of stored networks of a user. Beyond it, a new network replaces the oldest one.
	maxNetworks = 16
	// rememberTime is the timeout of storing a new network during a login.
	rememberTime = time.Second
)

// loginNetworks holds the networks from which a user logged in with the password: login-networks/<user>. Package
// password gives attempts from these networks priority, and accepts them even while clients in other networks are
// guessing the user's password. The networks are stored because the user may log in on another member, or after a
// restart.
var loginNetworks = store.NewTable[knownNetworks]("login-networks")

// knownNetworks is the record of the networks from which a user logged in, oldest first. Each is a result of
// password.Network.
type knownNetworks struct{ Networks []string }

// newNetwork holds the arguments of rememberNetworkCommand.
type newNetwork struct {
	User    cloud.UserID
	Network string
}

// networksOf returns the stored networks from which a user logged in.
func networksOf(r store.Reader, id cloud.UserID) ([]string, error) {
	n, err := loginNetworks.Get(r, string(id))
	if err != nil || n == nil {
		return nil, err
	}
	return n.Networks, nil
}

// rememberNetwork stores the network of a login, if it is not in had, the list of the user's stored networks. An error
// is logged and does not make the login fail.
func (s *Service) rememberNetwork(ctx context.Context, id cloud.UserID, network string, had []string) {
	if network == "" || slices.Contains(had, network) {
		return
	}
	ctx, cancel := context.WithTimeout(auth.Without(ctx), rememberTime)
	defer cancel()
	if _, err := rememberNetworkCommand.Call(ctx, s.opts.Commands, newNetwork{id, network}); err != nil {
		s.opts.Log.Warn("the network of a login is not stored: it is stored at the next login", "user", id, "err", err)
	}
}

var rememberNetworkCommand = newCommand("remember-network", leader.Repeatable, (*Service).rememberNetworkOnLeader)

// rememberNetworkOnLeader stores a network of a user. If maxNetworks are stored already, it removes the oldest.
func (*Service) rememberNetworkOnLeader(tx *store.Tx, q newNetwork) (none, error) {
	// Store nothing for a user who was deleted after the login began.
	if there, err := principal.Users.Has(tx, string(q.User)); err != nil || !there {
		return none{}, err
	}
	had, err := networksOf(tx, q.User)
	if err != nil || slices.Contains(had, q.Network) {
		return none{}, err
	}
	had = append(slices.Clone(had), q.Network)
	loginNetworks.Put(tx, &knownNetworks{had[max(0, len(had)-maxNetworks):]}, string(q.User))
	return none{}, nil
}
