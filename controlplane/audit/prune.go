package audit

import (
	"context"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/store"
)

// class is a sort of records that is bounded by itself.
type class uint8

const (
	// policy changes who may what, or the cluster itself.
	policy class = iota
	// changes are all other changes but those of credit.
	changes
	// credits are orders on wallets, whose own journal says by whom, too, and is kept for good.
	credits
	// refusals are what did not happen.
	refusals
	classes
)

// most are how many records of a class are kept.
var most = [classes]int{policy: 1_000_000, changes: 1_000_000, credits: 300_000, refusals: 300_000}

func (r *Record) class() class {
	switch {
	case r.Outcome != OK:
		return refusals
	case strings.HasPrefix(r.Method, "/identity."), strings.HasPrefix(r.Method, "/operator."), strings.HasPrefix(r.Method, "/member."):
		return policy
	case strings.HasPrefix(r.Method, "/etcdserverpb.") && r.Principal != "":
		return policy // without a credential anybody on a member's host could fill the class: those are changes
	case strings.HasPrefix(r.Method, "/credit."):
		return credits
	}
	return changes
}

// pruneAtOnce bounds the records that are read at a time, and those that a transaction removes.
const pruneAtOnce = 1000

// Prune removes the records that are too old, and of each class the oldest when there are too many. It is a leader's task.
func (s *Service) Prune(ctx context.Context) error { return s.prune(ctx, most) }

func (s *Service) prune(ctx context.Context, most [classes]int) error {
	oldest := newestFirst(s.opts.Store.Now() - Keep)
	var seen [classes]int
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
				c := r.Value.class()
				if seen[c]++; seen[c] > most[c] || r.Path[0] > oldest {
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
