package edge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// movableAddresses records the movable addresses for which this host answers ARP requests. An address is movable if
// another host can take it over. The addresses of NAT gateways, and the floating IPs of service IPs, are movable.
type movableAddresses struct {
	mu sync.Mutex // guards the fields below; it is held while proxy entries change and are announced
	// withdrawn is true between calls of Withdraw and Resume.
	withdrawn bool
	// answered has the addresses for which proxy entries may exist.
	answered map[netip.Addr]bool
}

// answer makes the proxy entries of the edge namespace, and announces new ones.
func (a *application) answer(n *network, r *Result) error {
	a.movable.mu.Lock()
	defer a.movable.mu.Unlock()
	have, want := n.empty(), n.empty()
	if err := have.readProxies(); err != nil {
		return err
	}
	answered := map[netip.Addr]bool{}
	for _, o := range routes(a.externals, a.connected) {
		if o.movable {
			if a.movable.withdrawn || o.vpc.Withhold {
				continue
			}
			answered[o.address] = true
		}
		want.proxy(o.external.device, o.address)
	}
	if a.movable.answered == nil {
		a.movable.answered = map[netip.Addr]bool{}
	}
	maps.Copy(a.movable.answered, answered)
	added, err := a.edge.reconcile(have.items, want.items)
	if err == nil {
		a.movable.answered = answered // After an error, obsolete entries may still exist.
	}
	return errors.Join(err, a.announce(added, want, r))
}

// Withdraw stops answering ARP requests for the addresses of NAT gateways and of floating IPs of service IPs, and
// returns these addresses. It does not wait for a running Set. Until Resume, no Set answers for them. Connections
// through these addresses are not ended: packets still arrive until the neighbours have learned the MAC address of
// another host.
func (e *Edge) Withdraw(ctx context.Context) ([]netip.Addr, error) {
	e.movable.mu.Lock()
	defer e.movable.mu.Unlock()
	e.movable.withdrawn = true
	list := slices.SortedFunc(maps.Keys(e.movable.answered), netip.Addr.Compare)
	if len(list) == 0 {
		return nil, nil
	}
	mounted, err := nsthread.Exists(e.path())
	if errors.Is(err, fs.ErrNotExist) || err == nil && !mounted {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("withdraw external addresses: %w", err)
	}
	var r Result
	s, err := openSpace(ctx, e.path(), &r)
	if err != nil {
		return nil, fmt.Errorf("withdraw external addresses: %w", err)
	}
	defer s.Close()
	have, err := s.network()
	if err != nil {
		return nil, fmt.Errorf("withdraw external addresses: %w", err)
	}
	obsolete := have.empty()
	if err := have.readProxies(); err != nil {
		return nil, fmt.Errorf("withdraw external addresses: %w", err)
	}
	for i := range e.externals {
		for _, address := range list {
			obsolete.proxy(e.externals[i].device, address)
		}
	}
	maps.DeleteFunc(obsolete.items, func(key string, _ item) bool { _, exists := have.items[key]; return !exists })
	if _, err := s.reconcile(obsolete.items, nil); err != nil {
		return nil, fmt.Errorf("withdraw external addresses: %w", err)
	}
	e.movable.answered = nil
	return list, nil
}

// Resume ends the effect of Withdraw. The next Set answers for the addresses again, except for those of VPCs with
// VPC.Withhold.
func (e *Edge) Resume() {
	e.movable.mu.Lock()
	defer e.movable.mu.Unlock()
	e.movable.withdrawn = false
}
