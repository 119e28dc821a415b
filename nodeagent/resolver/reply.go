package resolver

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/miekg/dns"
)

// maxUDPReply is the largest answer over UDP in bytes, and what the server announces that it accepts.
const maxUDPReply = 1232

// reply returns the answer to a client's query. Truncation is left to the caller.
func (s *Server) reply(client netip.Addr, request *dns.Msg) *dns.Msg {
	m := new(dns.Msg).SetReply(request)
	m.RecursionAvailable = true
	if request.Opcode != dns.OpcodeQuery {
		m.Rcode = dns.RcodeNotImplemented
		return m
	}
	options := request.IsEdns0()
	if len(request.Question) != 1 || countOptions(request) > 1 {
		m.Rcode = dns.RcodeFormatError
		return m
	}
	if options != nil {
		defer m.SetEdns0(maxUDPReply, options.Do())
		if options.Version() != 0 {
			m.Rcode = dns.RcodeBadVers
			return m
		}
	}
	q := request.Question[0]
	if l, ok := s.zone.Load().resolve(q); ok {
		l.addTo(m)
		return m
	}
	if !request.RecursionDesired {
		m.Rcode = dns.RcodeRefused
		return m
	}
	answer, rcode := s.forward(client, q, options != nil && options.Do(), request.CheckingDisabled)
	m.Rcode = rcode
	if answer != nil {
		m.Answer, m.Ns, m.Extra, m.Truncated = answer.Answer, answer.Ns, answer.Extra, answer.Truncated
		wanted := request.AuthenticatedData || options != nil && options.Do() // RFC 6840 section 5.8
		m.AuthenticatedData = answer.AuthenticatedData && wanted
	}
	return m
}

// forward returns the answer to a question from the cache or the host's resolvers, and its code. The answer is nil for
// codes other than NOERROR and NXDOMAIN.
func (s *Server) forward(client netip.Addr, q dns.Question, dnssecOK, noChecks bool) (*dns.Msg, int) {
	key := cacheKey{name: dns.CanonicalName(q.Name), kind: q.Qtype, dnssecOK: dnssecOK, noChecks: noChecks}
	if answer := s.cache.get(key); answer != nil {
		return answer, answer.Rcode
	}
	end, ok := s.limits.forward(client, s.forwarder.free())
	if !ok {
		return nil, dns.RcodeRefused
	}
	defer end()
	result, err, _ := s.flights.Do(fmt.Sprint(key), func() (any, error) {
		query := new(dns.Msg).SetQuestion(key.name, q.Qtype)
		query.CheckingDisabled = noChecks
		query.AuthenticatedData = true
		query.SetEdns0(upstreamSize, dnssecOK)
		answer, err := s.forwarder.exchange(s.ctx, query)
		if err != nil {
			return nil, err
		}
		answer.Extra = withoutOptions(answer.Extra)
		s.cache.put(key, answer)
		return answer, nil
	})
	if err != nil {
		s.log.Debug("forward DNS query", "client", client, "error", err)
		return nil, dns.RcodeServerFailure
	}
	answer := result.(*dns.Msg).Copy() // shared with other queries
	return answer, answer.Rcode
}

// replySize returns the largest size in bytes of the answer to a query.
func replySize(request *dns.Msg, udp bool) int {
	if !udp {
		return dns.MaxMsgSize
	}
	if o := request.IsEdns0(); o != nil {
		return min(max(int(o.UDPSize()), dns.MinMsgSize), maxUDPReply)
	}
	return dns.MinMsgSize
}

func countOptions(m *dns.Msg) (n int) {
	for _, r := range m.Extra {
		if r.Header().Rrtype == dns.TypeOPT {
			n++
		}
	}
	return n
}

func withoutOptions(records []dns.RR) []dns.RR {
	var kept []dns.RR
	for _, r := range records {
		if r.Header().Rrtype != dns.TypeOPT {
			kept = append(kept, r)
		}
	}
	return kept
}

// remote returns the client's address, and whether it uses UDP.
func remote(w dns.ResponseWriter) (client netip.Addr, udp bool) {
	switch a := w.RemoteAddr().(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap(), true
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap(), false
	}
	return netip.Addr{}, false
}
