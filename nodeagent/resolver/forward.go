package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// Limits of forwarding.
const (
	hostForwarded   = 2048            // queries of all VPCs that wait for an upstream resolver; each holds a socket
	forwardTimeout  = 5 * time.Second // for a query, with all its attempts; clients usually wait for 5 seconds
	upstreamTimeout = 1500 * time.Millisecond
	upstreamSize    = 1232 // bytes of an answer over UDP
)

var (
	errNoUpstream = errors.New("the host has no resolvers")
	errBusy       = errors.New("too many DNS queries are waiting on this host")
)

// Forwarder sends queries to the host's resolvers. It may be used concurrently.
type Forwarder struct {
	upstreams func() []netip.AddrPort
	slots     chan struct{}
	preferred atomic.Pointer[netip.AddrPort] // the upstream that answered last
}

// NewForwarder returns a forwarder. It calls upstreams for each query, so that the list may change; the function must
// not block.
func NewForwarder(upstreams func() []netip.AddrPort) *Forwarder {
	return &Forwarder{upstreams: upstreams, slots: make(chan struct{}, hostForwarded)}
}

// free returns the number of further queries that can be forwarded now, in addition to those that wait for an answer.
func (f *Forwarder) free() int { return cap(f.slots) - len(f.slots) }

// exchange returns the answer of the first upstream that gives one. An upstream that does not answer in time is asked
// twice, as UDP loses packets. The answer's code is NOERROR or NXDOMAIN.
func (f *Forwarder) exchange(ctx context.Context, query *dns.Msg) (*dns.Msg, error) {
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	default:
		return nil, errBusy
	}
	ctx, cancel := context.WithTimeout(ctx, forwardTimeout)
	defer cancel()
	pending := f.order()
	result := errNoUpstream
	for range 2 {
		var silent []netip.AddrPort
		for _, upstream := range pending {
			answer, err := ask(ctx, upstream, query)
			switch {
			case err != nil && ctx.Err() != nil:
				return nil, fmt.Errorf("forward DNS query: %w", errors.Join(err, ctx.Err()))
			case err != nil:
				result = err
				silent = append(silent, upstream)
			case answer.Rcode != dns.RcodeSuccess && answer.Rcode != dns.RcodeNameError:
				result = fmt.Errorf("upstream %s: %s", upstream, dns.RcodeToString[answer.Rcode])
			default:
				f.preferred.Store(&upstream)
				return answer, nil
			}
		}
		pending = silent
	}
	return nil, fmt.Errorf("forward DNS query: %w", result)
}

// order returns the upstreams, the preferred one first.
func (f *Forwarder) order() []netip.AddrPort {
	all := slices.Clone(f.upstreams())
	if p := f.preferred.Load(); p != nil {
		if i := slices.Index(all, *p); i > 0 {
			all = slices.Insert(slices.Delete(all, i, i+1), 0, *p)
		}
	}
	return all
}

// ask queries one upstream by UDP, and by TCP if the answer is truncated. If it cannot be queried by TCP, the truncated
// answer is returned.
func ask(ctx context.Context, upstream netip.AddrPort, query *dns.Msg) (*dns.Msg, error) {
	answer, err := askOver(ctx, "udp", upstream, query)
	if err != nil || !answer.Truncated {
		return answer, err
	}
	if whole, err := askOver(ctx, "tcp", upstream, query); err == nil {
		return whole, nil
	}
	return answer, nil
}

func askOver(ctx context.Context, network string, upstream netip.AddrPort, query *dns.Msg) (*dns.Msg, error) {
	client := dns.Client{Net: network, Timeout: upstreamTimeout, UDPSize: upstreamSize}
	query = query.Copy()
	query.Id = dns.Id() // for each attempt, so that a late answer or a guess does not match
	answer, _, err := client.ExchangeContext(ctx, query, upstream.String())
	if err != nil {
		return nil, fmt.Errorf("query upstream %s over %s: %w", upstream, network, err)
	}
	if !answer.Response || len(answer.Question) != 1 || !sameQuestion(answer.Question[0], query.Question[0]) {
		return nil, fmt.Errorf("query upstream %s over %s: the answer is not for the question", upstream, network)
	}
	return answer, nil
}

func sameQuestion(a, b dns.Question) bool {
	return a.Qtype == b.Qtype && a.Qclass == b.Qclass && strings.EqualFold(a.Name, b.Name)
}
