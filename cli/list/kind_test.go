package list

import (
	"context"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
)

// numbers is a list of the numbers below total, with pages of at most most numbers.
func numbers(total, most int, sizes *[]int32) *Kind[int] {
	return &Kind[int]{
		Name: strconv.Itoa,
		Page: func(_ context.Context, _ *dial.Conn, q Query) ([]int, string, error) {
			*sizes = append(*sizes, q.Size)
			var all []int
			for n := range total {
				all = append(all, n)
			}
			q.Size = min(q.Size, int32(most))
			return Slice(all, q)
		},
	}
}

// TestPagesEndAtTheLimit checks that a list with a limit can be continued: no object is read beyond the limit.
func TestPagesEndAtTheLimit(t *testing.T) {
	var sizes []int32
	k := numbers(10, 4, &sizes)
	got, next, err := k.read(t.Context(), nil, Query{}, 6)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1, 2, 3, 4, 5}, got)
	require.Equal(t, []int32{6, 2}, sizes)
	got, next, err = k.read(t.Context(), nil, Query{Token: next}, 6)
	require.NoError(t, err)
	require.Equal(t, []int{6, 7, 8, 9}, got)
	require.Empty(t, next)
}

// TestLimitWithKeep checks that a list whose objects are selected by the command line ends at the limit, and can be
// continued after it. It needs few calls, also if few objects are selected.
func TestLimitWithKeep(t *testing.T) {
	var sizes []int32
	k := numbers(10, 10, &sizes)
	k.Keep = func(n int) bool { return n%3 == 0 }
	got, next, err := k.read(t.Context(), nil, Query{}, 2)
	require.NoError(t, err)
	require.Equal(t, []int{0, 3}, got)
	got, next, err = k.read(t.Context(), nil, Query{Token: next}, 2)
	require.NoError(t, err)
	require.Equal(t, []int{6, 9}, got)
	require.Empty(t, next)
	require.Equal(t, []int32{session.PageSize, 4, session.PageSize}, sizes, "the first page is read again up to the number 3")
}

func TestARepeatedTokenIsAnError(t *testing.T) {
	k := &Kind[int]{Page: func(context.Context, *dial.Conn, Query) ([]int, string, error) { return nil, "same", nil }}
	_, _, err := k.read(t.Context(), nil, Query{}, 0)
	require.ErrorContains(t, err, "same page token twice")
}

func TestSliceRefusesTokensOfOtherLists(t *testing.T) {
	for _, token := range []string{"x", "-1", "4"} {
		_, _, err := Slice([]int{1, 2, 3}, Query{Token: token, Size: 1})
		require.ErrorContains(t, err, "--page-token")
	}
}

func TestFilterWithLabels(t *testing.T) {
	for _, tc := range []struct {
		filter string
		labels []string
		want   string
	}{
		{"", nil, ""},
		{"state = RUNNING OR vcpus > 1", []string{"env=prod"}, `(state = RUNNING OR vcpus > 1) AND labels."env" = "prod"`},
		{"", []string{"a/b=x=y", "tier"}, `labels."a/b" = "x=y" AND labels."tier":*`},
		{"", []string{`q=say "hi"`, "empty="}, `labels."q" = 'say "hi"' AND labels."empty":* AND labels."empty" = ""`},
		{"", []string{"any=*", "some=a*"}, `labels."any":* AND labels."any" = "*" AND labels."some" = "a*"`},
		{"", []string{"env=prod,tier=x"}, `labels."env" = "prod" AND labels."tier" = "x"`},
		{"", []string{"env==prod", "env == prod"}, `labels."env" = "prod" AND labels."env" = "prod"`},
		{"", []string{"env!=prod", "env != "}, `NOT (labels."env" = "prod") AND NOT (labels."env":* AND labels."env" = "")`},
		{"", []string{"!env", "! a/b"}, `NOT labels."env":* AND NOT labels."a/b":*`},
		{"", []string{"env in (prod, test),tier"}, `(labels."env" = "prod" OR labels."env" = "test") AND labels."tier":*`},
		{"", []string{"env notin (x)"}, `NOT (labels."env" = "x")`},
	} {
		got, err := (&Flags{filter: tc.filter, labels: tc.labels}).Filter()
		require.NoError(t, err)
		require.Equal(t, tc.want, got)
	}
	for _, bad := range []string{"", "=x", `a='"`, "a,", ",a", "a b", "env in prod", "env in ()", "env in (a,)", "env in (a", "env notin", "env>5", "env===x", "!env=x", "!", "env in (a)(b)"} {
		_, err := (&Flags{labels: []string{bad}}).Filter()
		require.ErrorContains(t, err, "--label", bad)
	}
}
