package ipam

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

// memory stores nodes and counts reads and writes.
type memory struct {
	nodes        map[NodeID]Node
	gets, writes int
	err          error
}

func newMemory() *memory { return &memory{nodes: map[NodeID]Node{}} }

func (m *memory) Get(id NodeID) (Node, error) {
	m.gets++
	return m.nodes[id], m.err
}

func (m *memory) Set(id NodeID, n Node) error {
	m.writes++
	m.nodes[id] = n
	return m.err
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestNewRange(t *testing.T) {
	for _, c := range []struct {
		first, last string
		size        uint64
	}{
		{"10.0.0.5", "10.0.0.5", 1},
		{"10.0.0.250", "10.0.1.5", 12},
		{"0.0.0.0", "255.255.255.255", 1 << 32},
	} {
		r, err := NewRange(addr(c.first), addr(c.last))
		require.NoError(t, err)
		require.Equal(t, c.size, r.Size())
	}
	_, err := NewRange(addr("10.0.0.5"), addr("10.0.0.4"))
	require.EqualError(t, err, "10.0.0.5 to 10.0.0.4 is not a range of IPv4 addresses")
	_, err = NewRange(addr("fd00::1"), addr("fd00::2"))
	require.Error(t, err)
	_, err = RangeOf(netip.MustParsePrefix("fd00::/64"))
	require.Error(t, err)
	_, err = RangeOf(netip.Prefix{})
	require.Error(t, err)
	r, err := RangeOf(netip.MustParsePrefix("10.1.2.3/28"))
	require.NoError(t, err)
	require.EqualValues(t, 16, r.Size())
}

// TestModel compares random calls on ranges of many sizes with a set of addresses.
func TestModel(t *testing.T) {
	for _, bounds := range [][2]string{
		{"10.0.0.7", "10.0.0.7"}, {"10.0.0.0", "10.0.0.15"}, {"10.0.0.0", "10.0.0.255"}, {"10.0.0.3", "10.0.1.2"},
		{"10.0.0.3", "10.0.1.3"}, {"10.0.255.0", "10.1.7.8"},
	} {
		first, last := addr(bounds[0]), addr(bounds[1])
		r, err := NewRange(first, last)
		require.NoError(t, err)
		m, assigned, rnd := newMemory(), map[netip.Addr]bool{}, rand.New(rand.NewPCG(1, r.size))
		lowest := func() netip.Addr {
			for a := first; !last.Less(a); a = a.Next() {
				if !assigned[a] {
					return a
				}
			}
			return netip.Addr{}
		}
		for i := range 4 * int(r.size) {
			a := address(number(first) + uint32(rnd.Uint64N(r.size)))
			is, err := r.IsAssigned(m, a)
			require.NoError(t, err)
			require.Equal(t, assigned[a], is)
			switch {
			case i < int(r.size) || rnd.IntN(2) == 0: // fill the range first
				want := lowest()
				got, err := r.AssignLowest(m)
				if !want.IsValid() {
					require.ErrorIs(t, err, ErrFull)
					continue
				}
				require.NoError(t, err)
				require.Equal(t, want, got)
				assigned[got] = true
			case rnd.IntN(3) == 0:
				err := r.Assign(m, a)
				require.Equal(t, assigned[a], errors.Is(err, ErrAssigned))
				assigned[a] = true
			default:
				err := r.Release(m, a)
				require.Equal(t, !assigned[a], errors.Is(err, ErrUnassigned))
				delete(assigned, a)
			}
		}
	}
}

func TestOutside(t *testing.T) {
	r, err := RangeOf(netip.MustParsePrefix("10.0.0.0/24"))
	require.NoError(t, err)
	for _, a := range []netip.Addr{addr("9.255.255.255"), addr("10.0.1.0"), addr("fd00::1"), {}} {
		m := newMemory()
		require.ErrorIs(t, r.Assign(m, a), ErrOutside)
		require.ErrorIs(t, r.Release(m, a), ErrOutside)
		_, err := r.IsAssigned(m, a)
		require.ErrorIs(t, err, ErrOutside)
		require.Zero(t, m.gets+m.writes)
	}
}

// TestCostDoesNotDependOnUse fills most of a /16 and counts the nodes that one more address reads and writes.
func TestCostDoesNotDependOnUse(t *testing.T) {
	r, err := RangeOf(netip.MustParsePrefix("10.0.0.0/16"))
	require.NoError(t, err)
	m := newMemory()
	for range 60_000 {
		_, err := r.AssignLowest(m)
		require.NoError(t, err)
	}
	m.gets, m.writes = 0, 0
	got, err := r.AssignLowest(m)
	require.NoError(t, err)
	require.Equal(t, "10.0.234.96", got.String())
	require.LessOrEqual(t, m.gets, 4)
	require.Equal(t, 1, m.writes)
}

func TestErrorOfTheStore(t *testing.T) {
	r, err := RangeOf(netip.MustParsePrefix("10.0.0.0/24"))
	require.NoError(t, err)
	m := newMemory()
	m.err = errors.New("no leader")
	_, err = r.AssignLowest(m)
	require.ErrorIs(t, err, m.err)
	require.ErrorIs(t, r.Assign(m, addr("10.0.0.1")), m.err)
	require.ErrorIs(t, r.Release(m, addr("10.0.0.1")), m.err)
}
