package resolver

import (
	"hash/maphash"
	"time"

	"github.com/elastic/go-freelru"
	"github.com/miekg/dns"
)

// Limits of the cache of a VPC. Together they bound its memory to 4 MiB.
const (
	cacheEntries   = 1024
	maxCachedBytes = 4096 // of one answer
	maxPositive    = time.Hour
	maxNegative    = 5 * time.Minute // RFC 2308 section 5 permits up to three hours
)

// cacheKey identifies a cached answer by all properties of a query that the answer depends on.
type cacheKey struct {
	name               string // canonical
	kind               uint16
	dnssecOK, noChecks bool // the bits DO and CD of the query
}

// cache holds forwarded answers, packed. It may be used concurrently.
type cache struct {
	entries *freelru.SyncedLRU[cacheKey, cached]
	now     func() time.Time
}

type cached struct {
	packed          []byte
	stored, expires time.Time
}

func newCache() *cache {
	seed := maphash.MakeSeed()
	entries, err := freelru.NewSynced[cacheKey, cached](cacheEntries, func(k cacheKey) uint32 {
		return uint32(maphash.Comparable(seed, k))
	})
	if err != nil {
		panic(err) // the arguments are constants
	}
	return &cache{entries: entries, now: time.Now}
}

// get returns a copy of an answer, whose TTLs are reduced by the time since it was stored. It returns nil if there is
// none.
func (c *cache) get(k cacheKey) *dns.Msg {
	e, ok := c.entries.Get(k)
	now := c.now()
	if !ok || !now.Before(e.expires) {
		return nil
	}
	m := new(dns.Msg)
	if m.Unpack(e.packed) != nil {
		return nil
	}
	age := uint32(now.Sub(e.stored) / time.Second)
	for _, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		for _, r := range section {
			r.Header().Ttl -= min(age, r.Header().Ttl)
		}
	}
	return m
}

// put stores an answer for as long as its records permit.
func (c *cache) put(k cacheKey, m *dns.Msg) {
	keep := lifetime(m)
	if keep <= 0 {
		return
	}
	packed, err := m.Pack()
	if err != nil || len(packed) > maxCachedBytes {
		return
	}
	now := c.now()
	c.entries.Add(k, cached{packed: packed, stored: now, expires: now.Add(keep)})
}

// lifetime returns how long an answer may be cached: the smallest TTL of its records. Negative answers without a SOA
// record, truncated ones and errors are not cached.
func lifetime(m *dns.Msg) time.Duration {
	negative := len(m.Answer) == 0 || m.Rcode == dns.RcodeNameError
	if m.Truncated || m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		return 0
	}
	limit, hasSOA := maxPositive, false
	if negative {
		limit = maxNegative
	}
	for _, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		for _, r := range section {
			ttl := r.Header().Ttl
			if soa, ok := r.(*dns.SOA); ok && negative {
				hasSOA = true
				ttl = min(ttl, soa.Minttl)
			}
			limit = min(limit, time.Duration(ttl)*time.Second)
		}
	}
	if negative && !hasSOA {
		return 0
	}
	return limit
}
