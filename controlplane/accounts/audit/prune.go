package audit

import (
	"context"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// class is a class of audit records that has limits of its own, so that records of other classes cannot evict its
// records.
type class uint8

const (
	// policy holds changes of roles, tenants, quotas and the cluster itself.
	policy class = iota
	// answers holds users' responses to invitations. They belong to no org, like records of operators, and must not
	// evict those.
	answers
	// credentials holds the issue and the revocation of tokens, and changes of passwords.
	credentials
	// changes holds all changes of VMs and other objects that are in no other class.
	changes
	// credits holds operations on wallets. The transactions of a wallet also name the principal, and are never deleted.
	credits
	// refusals holds refused and failed calls.
	refusals
	classes
)

// limit holds the maximum numbers of records of a class. Prune removes the oldest records beyond them.
type limit struct {
	// each is the limit of one share of the class. What a share is depends on the class; see Record.shares.
	each int
	// cloud is the limit of the share of records without an org or, in classes shared by principal, without a
	// principal.
	cloud int
	// total is the limit of all shares of an org together. In classes shared by principal it is the limit of all shares
	// of the class, except those of service accounts, for which total applies per org.
	total int
}

// limits holds the limit of each class. A record has about 300 bytes.
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

// share identifies a set of records with one limit. When the set is full, each new record evicts the oldest one.
type share struct {
	class     class
	org, name string
}

// shares returns the share that a record belongs to, and the set of shares to which limit.total applies. In class
// policy a share is an org and a principal, so that an org's administrator cannot evict records of what the cloud's
// administrators did to the org. In answers, credentials and refusals a share is a principal, because every caller can
// cause refusals in any org; the total of service accounts is that of their org, because an org can create any number
// of them. In the other classes a share is an org.
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

// most returns the maximum number of records in a share: cloud if the share has no org or principal by which the class
// is shared, and each otherwise.
func (l *limit) most(s share) int {
	byOrg := s.class != answers && s.class != credentials && s.class != refusals
	if byOrg && s.org == "" || !byOrg && s.name == "" {
		return l.cloud
	}
	return l.each
}

// counter counts the kept records by share. Call admits for each record, the newest first.
type counter struct {
	limits         [classes]limit
	counts, totals map[share]int
}

func newCounter(limits [classes]limit) *counter {
	return &counter{limits: limits, counts: map[share]int{}, totals: map[share]int{}}
}

// admits reports whether r is within the limits of its share, and counts it if so.
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
	// pruneAtOnce is the maximum number of records that Prune reads at a time, and removes in one transaction.
	pruneAtOnce = 1000
	// PruneEvery is the time between two runs of Prune. A run reads the records only if, since the last run that did,
	// pruneAfter has passed or the store has had pruneWrites updates.
	PruneEvery  = 5 * time.Minute
	pruneAfter  = time.Hour
	pruneWrites = 200_000
)

// Prune removes the records that are older than Keep, and the oldest records of each share that exceeds its limit. Only
// the leader runs it.
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
