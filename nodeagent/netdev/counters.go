package netdev

import (
	"context"
	"fmt"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// PortCounters returns the bytes and packets that the ports of a VPC on this host have received and sent since their
// devices were made. The result has no entry for a port without a device.
func (h *Host) PortCounters(ctx context.Context, id cloud.VPCID) (map[cloud.PortID]cloud.PortCounters, error) {
	out := map[cloud.PortID]cloud.PortCounters{}
	err := h.enter(ctx, id, func(k *kernel) error {
		list, err := netspace.List("devices", k.vpc.LinkList)
		if err != nil {
			return err
		}
		for _, one := range list {
			attrs := one.Attrs()
			port, owned := strings.CutPrefix(attrs.Alias, aliasPrefix)
			if !owned || convertLink(one).kind != portLink || attrs.Statistics == nil {
				continue
			}
			// The host receives on the device what the guest sends.
			s := attrs.Statistics
			out[cloud.PortID(port)] = cloud.PortCounters{
				ReceivedBytes: s.TxBytes, ReceivedPackets: s.TxPackets, SentBytes: s.RxBytes, SentPackets: s.RxPackets,
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the counters of the ports of VPC %s: %w", id, err)
	}
	return out, nil
}
