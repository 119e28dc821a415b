package audit

import (
	"context"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// class is a sort of records that is bounded by itself.
type class uint8

const (
	// policy changes roles, tenants, quotas or the cluster itself.
	policy class = iota
	// answers are what users say to invitations. They belong to no org, as what operators do, and must not take its place.
	answers
	// credentials are tokens that were issued and revoked, and passwords that were set.
	credentials
	// changes are all other changes but those of credit.
	changes
	// credits are orders on wallets, whose own journal says by whom, too, and is kept for good.
	credits
	// refusals are what did not happen.
	refusals
	classes
)

// limit is how many records of a class are kept.
type limit struct {
	// each is for each share of the class; see share.
	each int
	// cloud is for the share of records that belong to no org, or to nobody.
	cloud int
	// total is for all shares of an org together; of classes that are not shared by org, for the whole class without the
	// service accounts, which have a total for each org.
	total int
}

// limits are how many records are kept of each class. A record takes about 300 bytes.
var limits = [classes]limit{
	policy:      {each: 100_000, cloud: 1_000_000, total: 1_000_000},
	answers:     {each: 10_000, cloud: 10_000, total: 1_000_000},
	credentials: {each: 10_000, cloud: 10_000, total: 1_000_000},
	changes:     {each: 200_000, cloud: 1_000_000, total: 1_000_000},
	credits:     {each: 100_000, cloud: 300_000, total: 300_000},
	refusals:    {each: 10_000, cloud: 300_000, total: 1_000_000},
}

func (r *Record) class() class {
	if r.Outcome != OK {
		return refusals
	}
	service, method, _ := strings.Cut(strings.TrimPrefix(r.Method, "/"), "/")
	switch {
	case strings.HasPrefix(service, "identity."):
		switch method {
		case "IssueToken", "ExchangeToken", "RevokeToken", "RevokeTokens", "SetPassword":
			return credentials
		case "AcceptInvitation", "DeclineInvitation":
			return answers
		}
		return policy
	case strings.HasPrefix(service, "operator."), strings.HasPrefix(service, "member."):
		return policy
	case strings.HasPrefix(service, "etcdserverpb.") && r.Principal != "":
		return policy // without a credential any process on a member's host could fill the class: those are changes
	case strings.HasPrefix(service, "credit."):
		return credits
	}
	return changes
}

// share is whose records push out whose.
type share struct {
	class     class
	org, name string
}

// shares returns the share that a record belongs to, and the total that the share belongs to. Policy is shared by org and
// principal: an org's administrator cannot push out what the cloud's did to the org. Answers, credentials and refusals are
// shared by principal, because anybody can be refused in any org; the total of service accounts is their org's, because an
// org makes as many as it likes. The rest is shared by org.
func (r *Record) shares() (own, total share) {
	c := r.class()
	switch c {
	case policy:
		return share{c, string(r.Tenant.Org), r.Principal}, share{class: c, org: string(r.Tenant.Org)}
	case answers, credentials, refusals:
		total = share{class: c}
		if r.Proof == cloud.ProofAppCred {
			total.org = string(r.Tenant.Org)
		}
		return share{c, "", r.Principal}, total
	}
	return share{class: c, org: string(r.Tenant.Org)}, share{class: c, org: string(r.Tenant.Org)}
}

// most returns how many records of a share are kept.
func (l *limit) most(s share) int {
	byOrg := s.class != answers && s.class != credentials && s.class != refusals
	if byOrg && s.org == "" || !byOrg && s.name == "" {
		return l.cloud
	}
	return l.each
}

// counter counts the records that are kept, from the newest on.
type counter struct {
	limits       [classes]limit
	kept, totals map[share]int
}

func newCounter(limits [classes]limit) *counter {
	return &counter{limits: limits, kept: map[share]int{}, totals: map[share]int{}}
}

// keeps reports whether there is room for one record more, and counts it if so.
func (c *counter) keeps(r *Record) bool {
	own, total := r.shares()
	l := &c.limits[own.class]
	inCloud := own.class == policy && own.org == "" // only operators write there, each with a share of their own
	if c.kept[own] >= l.most(own) || !inCloud && c.totals[total] >= l.total {
		return false
	}
	c.kept[own]++
	c.totals[total]++
	return true
}

const (
	// pruneAtOnce bounds the records that are read at a time, and those that a transaction removes.
	pruneAtOnce = 1000
	// PruneEvery is the time between two runs of Prune, which looks at the records when pruneAfter have passed since it did,
	// or pruneWrites updates have been made.
	PruneEvery  = 5 * time.Minute
	pruneAfter  = time.Hour
	pruneWrites = 200_000
)

// Prune removes the records that are too old, and of each share the oldest when there are too many. It is a leader's task.
func (s *Service) Prune(ctx context.Context) error {
	now, revision := s.opts.Store.Now(), s.opts.Store.Revision()
	s.mu.Lock()
	due := s.pruned == 0 || now-s.pruned >= pruneAfter.Milliseconds() || now < s.pruned || revision-s.prunedAt >= pruneWrites
	s.mu.Unlock()
	if !due {
		return nil
	}
	if err := s.prune(ctx, limits); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pruned, s.prunedAt = now, revision
	return nil
}

func (s *Service) prune(ctx context.Context, limits [classes]limit) error {
	oldest := newestFirst(s.opts.Store.Now() - Keep)
	count := newCounter(limits)
	var after []string
	for more := true; more && ctx.Err() == nil; {
		var gone [][]string
		err := s.opts.Store.Local(func(v *store.View) error {
			page, rest, err := records.ListAfter(v, pruneAtOnce, after)
			if err != nil {
				return err
			}
			more = rest
			for _, r := range page {
				after = r.Path
				if r.Path[0] > oldest || !count.keeps(r.Value) {
					gone = append(gone, r.Path)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		if len(gone) == 0 {
			continue
		}
		if _, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			for _, path := range gone {
				records.Delete(tx, path...)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return ctx.Err()
}
