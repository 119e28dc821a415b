package edge

import (
	"fmt"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
)

// table is the package's nftables table in the edge namespace and in those of VPCs.
var table = netfilter.Table{Family: "ip", Name: "trivet-edge"}

// setTable makes the package's table in the namespace equal to chains, in one transaction.
func (s *space) setTable(chains []netfilter.Chain) error {
	changed, err := table.Set(s.ctx, s.NS, chains)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Path, err)
	}
	if changed {
		s.changed("nft replace table %s", table)
	}
	return nil
}

// deleteTable deletes the package's table in the namespace if it exists.
func (s *space) deleteTable() error {
	changed, err := table.Delete(s.ctx, s.NS)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Path, err)
	}
	if changed {
		s.changed("nft delete table %s", table)
	}
	return nil
}
