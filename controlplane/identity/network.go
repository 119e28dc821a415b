package identity

import (
	"context"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// maxNetworks is how many networks a user is known to log in from: the last that were new.
	maxNetworks = 16
	// rememberTime bounds how long a login waits for a new network to be stored.
	rememberTime = time.Second
)

// loginNetworks are the networks from which a user logged in with the password: login-networks/<user>. Package password
// serves these first when many passwords are being tried, and goes on trying them when a name is being guessed. They are
// records because a user logs in at any member, and after a restart.
var loginNetworks = store.NewTable[knownNetworks]("login-networks")

// knownNetworks are what password.Network gives, oldest first.
type knownNetworks struct{ Networks []string }

// newNetwork is a login from a network that is not stored yet.
type newNetwork struct {
	User    cloud.UserID
	Network string
}

// networksOf returns the stored networks of a user.
func networksOf(r store.Reader, id cloud.UserID) ([]string, error) {
	n, err := loginNetworks.Get(r, string(id))
	if err != nil || n == nil {
		return nil, err
	}
	return n.Networks, nil
}

// rememberNetwork stores the network of a login unless it is among those that are stored. The login does not depend on it.
func (s *Service) rememberNetwork(ctx context.Context, id cloud.UserID, network string, had []string) {
	if network == "" || slices.Contains(had, network) {
		return
	}
	ctx, cancel := context.WithTimeout(auth.Without(ctx), rememberTime)
	defer cancel()
	if _, err := s.do.remember(ctx, newNetwork{id, network}); err != nil {
		s.opts.Log.Warn("the network of a login is not stored: it is stored at the next login", "user", id, "err", err)
	}
}

func doRemember(tx *store.Tx, q newNetwork) (none, error) {
	// A user who was deleted meanwhile leaves no record.
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
