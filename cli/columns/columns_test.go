package columns

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFlagsOfUnsortedTable checks that a table without flags has the columns that are not optional and keeps the order.
func TestFlagsOfUnsortedTable(t *testing.T) {
	all := []Column[int]{
		{Name: "N", Text: func(int) string { return "n" }},
		{Name: "HIDDEN", Text: func(int) string { return "h" }, Optional: true},
	}
	table, err := Choose(&Flags{}, all)
	require.NoError(t, err)
	objects := []int{3, 1, 2}
	table.Sort(objects)
	require.Equal(t, []int{3, 1, 2}, objects)
	require.Equal(t, []string{"n"}, table.row(1))

	table, err = Choose(&Flags{columns: []string{"hidden", "n"}, sort: "-N"}, []Column[int]{{Name: "N", Order: By(func(i int) int { return i })}, all[1]})
	require.NoError(t, err)
	table.Sort(objects)
	require.Equal(t, []int{3, 2, 1}, objects)
	require.Equal(t, []string{"HIDDEN", "N"}, names(table.columns))
}
