package list

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/show"
)

type thing struct {
	name string
	size uint64
	at   int64
}

func thingColumns(now time.Time) []Column[thing] {
	return []Column[thing]{
		{Name: "NAME", Text: func(o thing) string { return o.name }, Max: 5},
		{Name: "OTHER NAME", Text: func(o thing) string { return o.name }, In: OnDemand},
		Size("SIZE", func(o thing) uint64 { return o.size }),
		Age("AGE", func() time.Time { return now }, func(o thing) int64 { return o.at }),
		Time("CREATED", func(o thing) int64 { return o.at }, InWide),
		Until("ENDS", func() time.Time { return now }, func(o thing) int64 { return o.at + 7200_000 }),
	}
}

func TestTable(t *testing.T) {
	now := time.UnixMilli(1_000_000_000_000)
	all := []thing{{"longer", 1 << 20, now.UnixMilli() - 5000}, {"a,b", 9 << 10, now.UnixMilli() - 1000}}
	for _, tc := range []struct {
		form  show.Form
		flags Flags
		want  string
	}{
		{show.Table, Flags{}, "NAME   SIZE   AGE  ENDS\nlong…  1 MiB  5s   in 119m\na,b    9 KiB  1s   in 119m\n"},
		{show.Wide, Flags{}, "NAME    SIZE   CREATED               ENDS\n" +
			"longer  1 MiB  2001-09-09T01:46:35Z  2001-09-09T03:46:35Z\na,b     9 KiB  2001-09-09T01:46:39Z  2001-09-09T03:46:39Z\n"},
		{show.CSV, Flags{}, "name,size,created,ends\n" +
			"longer,1048576,2001-09-09T01:46:35Z,2001-09-09T03:46:35Z\n\"a,b\",9216,2001-09-09T01:46:39Z,2001-09-09T03:46:39Z\n"},
		{show.CSV, Flags{noHeaders: true, columns: []string{"other-name"}}, "longer\n\"a,b\"\n"},
		{show.Table, Flags{columns: []string{"name", "Other Name"}, sort: "name"}, "NAME    OTHER NAME\na,b     a,b\nlonger  longer\n"},
		{show.Table, Flags{noHeaders: true, columns: []string{"size"}, sort: "-size"}, "1 MiB\n9 KiB\n"},
		{show.Table, Flags{noHeaders: true, columns: []string{"age"}, sort: "AGE"}, "1s\n5s\n"},
	} {
		table, err := table(&tc.flags, tc.form, thingColumns(now))
		require.NoError(t, err)
		objects := append([]thing(nil), all...)
		table.sort(objects)
		var b bytes.Buffer
		require.NoError(t, table.print(&b, objects...))
		require.Equal(t, tc.want, b.String())
	}
}

func TestUnknownColumn(t *testing.T) {
	for _, f := range []Flags{{columns: []string{"colour"}}, {sort: "-colour"}} {
		_, err := table(&f, show.Table, thingColumns(time.Time{}))
		require.ErrorContains(t, err, `there is no column "colour": want name, other-name, size, age, created, ends`)
	}
}

func TestCellsAreComparedAsNumbersIfTheyAreNumbers(t *testing.T) {
	require.Negative(t, compareCells("9", "10"))
	require.Positive(t, compareCells("9", "10a"))
	require.Zero(t, compareCells("a", "a"))
}
