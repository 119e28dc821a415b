package vpc

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestFailedWithdrawalEnds lets a withdrawal of addresses fail. The withdrawal must be completed after the host has
// reached the control plane again, and must end with the next snapshot. Otherwise package edge would not answer for the
// addresses again.
func TestFailedWithdrawalEnds(t *testing.T) {
	f := newFixture(t)
	began := time.Now()
	contact := began.Add(-2 * f.o.lease)
	f.o.Contact = func() (time.Time, bool) { return contact, true }
	calls := func() (out []string) {
		f.checkContact(began)
		f.plane.set(func() { out, f.plane.calls = f.plane.calls, nil })
		return out
	}
	f.plane.set(func() { f.plane.failWithdraw = errors.New("refused by the test") })
	require.Equal(t, []string{"withdraw"}, calls())
	contact = time.Now().Add(time.Hour)
	f.Networks.mu.Lock()
	f.Networks.contact.snapshot = time.Now()
	f.Networks.mu.Unlock()
	require.Equal(t, []string{"withdraw"}, calls())
	f.plane.set(func() { f.plane.failWithdraw = nil })
	require.Equal(t, []string{"withdraw"}, calls())
	require.Equal(t, []string{"restore"}, calls())
	require.Empty(t, calls())
}
