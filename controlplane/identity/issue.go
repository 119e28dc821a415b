package identity

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

type tokenRequest struct {
	User         cloud.UserID
	Password     string
	Address      string
	TTL          uint64
	Org, Project string
}

type issued struct {
	text    string
	expires time.Time
}

// token makes the token that was asked for, and says whether its holder is proven.
func (s *Service) token(ctx context.Context, ask tokenRequest) (issued, bool, error) {
	ttl, err := checkTTL(ask.TTL)
	if err != nil {
		return issued{}, false, err
	}
	scope := cloud.Tenant{Org: cloud.OrgID(ask.Org), Project: cloud.ProjectID(ask.Project)}
	for _, id := range []struct{ field, value string }{{"org_id", ask.Org}, {"project_id", ask.Project}} {
		if id.value != "" {
			if err := cloud.CheckCallerID(id.field, id.value); err != nil {
				return issued{}, false, err
			}
		}
	}
	who, err := s.proven(ctx, ask.User, ask.Password, ask.Address)
	if err != nil {
		return issued{}, false, err
	}
	say := claims{Proof: cloud.ProofNone}
	if who != nil {
		say.Proof, say.Epoch = cloud.ProofPassword, who.Epoch
	}
	if scope.Project != "" && scope.Org == "" {
		// Project ids are unique in the cloud, so a project names its org.
		err := s.opts.Store.Recent(ctx, staleness, func(v *store.View) error {
			p, err := projects.Get(v, string(scope.Project))
			if p != nil {
				scope.Org = p.Org
			}
			return err
		})
		if err != nil {
			return issued{}, false, err
		}
	}
	say.Subject, say.Org, say.Project = string(ask.User), scope.Org, scope.Project
	out, err := s.issue(ctx, say, ttl)
	return out, who != nil, err
}
