package edge

import (
	"fmt"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
)

// table is the package's nftables table in the edge namespace and in those of VPCs.
var table = netfilter.Table{Family: "ip", Name: "trivet-edge"}

// chain is a base chain of nftables.
type chain struct {
	name, kind, hook string
	priority         int
	policy           string
	rules            []string
}

// tableChains converts chains to those of package netfilter.
func tableChains(chains []chain) []netfilter.Chain {
	var out []netfilter.Chain
	for _, c := range chains {
		out = append(out, netfilter.Chain{
			Name: c.name, Kind: c.kind, Hook: c.hook, Priority: c.priority, Policy: c.policy, Rules: c.rules,
		})
	}
	return out
}

// setTable makes the package's table in the namespace equal to chains, in one transaction.
func (s *space) setTable(chains []chain) error {
	changed, err := table.Set(s.ctx, s.ns, tableChains(chains))
	if err != nil {
		return fmt.Errorf("%s: %w", s.path, err)
	}
	if changed {
		s.changed("nft replace table %s", table)
	}
	return nil
}

// deleteTable deletes the package's table in the namespace if it exists.
func (s *space) deleteTable() error {
	changed, err := table.Delete(s.ctx, s.ns)
	if err != nil {
		return fmt.Errorf("%s: %w", s.path, err)
	}
	if changed {
		s.changed("nft delete table %s", table)
	}
	return nil
}
