package books

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBooksAfterALoad(t *testing.T) {
	must := After(3, 100, 5, 10)
	require.Equal(t, Books{Wallets: 3, Transactions: 13, Reservations: 5, Deposited: 300, Consumed: 50, Balance: 250}, must)
	require.NoError(t, must.Compare(must))
	for name, wrong := range map[string]func(*Books){
		"transactions: 12, must be 13":   func(b *Books) { b.Transactions-- },
		"credit reserved: 10, must be 0": func(b *Books) { b.Reserved += 10 },
		"balance: 251, must be 250":      func(b *Books) { b.Balance++ },
	} {
		got := must
		wrong(&got)
		require.ErrorContains(t, got.Compare(must), name)
	}
}
