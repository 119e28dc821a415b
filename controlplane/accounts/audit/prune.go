package audit

import (
	"context"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// class groups audit records by the kind of call. Each class has separate limits, so that records of one class cannot
// evict records of another.
type class uint8

const (
	// policy is the class of changes of roles, tenants, quotas and the cluster itself.
	policy class = iota
	// answers is the class of users' responses to invitations. These records, like those of operators, belong to no
	// org. They have a separate class so that they cannot evict the records of operators.
	answers
	// credentials is the class of the issue and the revocation of tokens, and of changes of passwords.
	credentials
	// changes is the class of all changes of VMs and other objects that are in no other class.
	changes
	// credits is the class of operations on wallets. Little is lost when these records are removed, because the
	// transactions of a wallet also name the principal and are never deleted.
	credits
	// refusals is the class of refused and failed calls.
	refusals
	classes
)

// limit holds the maximum numbers of stored records of one class. If a maximum is exceeded, Prune removes the oldest
// records.
type limit struct {
	// each is the maximum number of records of one share. A share is the records of one org, of one principal, or of
	// one principal in one org, depending on the class: see Record.shares.
	each int
	// cloud is the maximum number of records that have no org. In the classes whose shares are per principal, it is the
	// maximum number of records that have no principal.
	cloud int
	// total is the maximum number of records of all shares of one org together. In the classes whose shares are per
	// principal, it is the maximum for all principals together, but service accounts are counted per org. The maximum
	// does not apply to records of class policy without an org.
	total int
}

// limits holds the limits of each class, in records. A record has about 300 bytes.
var limits = [classes]limit{
	policy:      {each: 100_000, cloud: 1_000_000, total: 1_000_000},
	answers:     {each: 10_000, cloud: 10_000, total: 1_000_000},
	credentials: {each: 10_000, cloud: 10_000, total: 1_000_000},
	changes:     {each: 200_000, cloud: 1_000_000, total: 1_000_000},
	credits:     {each: 100_000, cloud: 300_000, total: 300_000},
	refusals:    {each: 10_000, cloud: 300_000, total: 1_000_000},
}

// class returns the class of a record, which depends on its outcome and method.
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
		return policy // calls without a principal are in class changes, because every local process can make them and could fill policy
	case strings.HasPrefix(service, "credit."):
		return credits
	}
	return changes
}

// share identifies a group of records of one class that are counted together. When the group has reached its maximum,
// each new record evicts the oldest record of the group.
type share struct {
	class     class
	org, name string
}

// shares returns the share (group of records with a common maximum) of the record r, and the larger group to which
// limit.total applies:
//   - In class policy, a share is one principal in one org, so that an org's administrator cannot evict the records of
//     what the cloud's administrators did to the org.
//   - In answers, credentials and refusals, a share is one principal, because every caller can cause refusals in any
//     org. The total is counted per org for service accounts, because an org can create any number of them.
//   - In the other classes, a share is one org.
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

// most returns the maximum number of records in the share s. It is l.cloud if s has no org (in classes counted per org)
// or no principal (in classes counted per principal). Otherwise it is l.each.
func (l *limit) most(s share) int {
	byOrg := s.class != answers && s.class != credentials && s.class != refusals
	if byOrg && s.org == "" || !byOrg && s.name == "" {
		return l.cloud
	}
	return l.each
}

// counter counts the records of each share. Call the method admits for each record, in the order from the newest to the
// oldest.
type counter struct {
	limits         [classes]limit
	counts, totals map[share]int
}

func newCounter(limits [classes]limit) *counter {
	return &counter{limits: limits, counts: map[share]int{}, totals: map[share]int{}}
}

// admits reports whether the record r may be kept: its share has not reached a limit. If so, admits counts r.
func (c *counter) admits(r *Record) bool {
	own, total := r.shares()
	l := &c.limits[own.class]
	inCloud := own.class == policy && own.org == "" // only operators write such records, each in a share of their own
	if c.counts[own] >= l.most(own) || !inCloud && c.totals[total] >= l.total {
		return false
	}
	c.counts[own]++
	c.totals[total]++
	return true
}

const (
	// pruneAtOnce is the maximum number of records that Prune reads at a time, and the maximum that it removes in one
	// transaction.
	pruneAtOnce = 1000
	// PruneEvery is the interval of calls of Prune. Most calls do nothing: Prune reads the records only if pruneAfter
	// has passed, or the store has had pruneWrites updates, since the last time that it read them.
	PruneEvery  = 5 * time.Minute
	pruneAfter  = time.Hour
	pruneWrites = 200_000
)

// Prune removes the records older than Keep, and the oldest records of each org or principal that exceeds a limit (see
// Record.shares). Only the leader runs Prune.
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
				if r.Path[0] > oldest || !count.admits(r.Value) {
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
