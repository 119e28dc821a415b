package list

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
)

// Flags holds the values of the flags that all lists share.
type Flags struct {
	columns   []string
	sort      string
	noHeaders bool
	limit     int
	pageToken string
	filter    string
	labels    Labels
}

// add adds the flags to a command. The names of the columns are their shell completions.
func (f *Flags) add(c *cobra.Command, columns []string) {
	p := c.Flags()
	p.StringSliceVar(&f.columns, "columns", nil, "columns to show, in this order: "+strings.Join(columns, ","))
	p.StringVar(&f.sort, "sort", "", "column to sort by; with a minus sign before it, in descending order")
	p.BoolVar(&f.noHeaders, "no-headers", false, "print no header")
	p.IntVar(&f.limit, "limit", 0, "list at most this many")
	p.StringVar(&f.pageToken, "page-token", "", "continue a list that --limit has ended, with its next_page_token")
	complete := cobra.FixedCompletions(columns, cobra.ShellCompDirectiveNoFileComp)
	_ = c.RegisterFlagCompletionFunc("columns", complete) // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("sort", complete)
	session.Exclusive(c, "sort", "page-token")
}

// addFilter adds the flag for a filter. example is a filter for its help, or empty.
func (f *Flags) addFilter(c *cobra.Command, example string) {
	usage := "list only objects that match"
	if example != "" {
		usage += ", such as: " + example
	}
	c.Flags().StringVar(&f.filter, "filter", "", usage)
}

// Filter returns the filter of --filter and --label, in the form of AIP-160. It returns a *session.Usage error for an
// invalid label.
func (f *Flags) Filter() (string, error) {
	labels, err := f.labels.Filter()
	switch {
	case err != nil || strings.TrimSpace(f.filter) == "":
		return labels, err
	case labels == "":
		return f.filter, nil
	}
	return "(" + f.filter + ") AND " + labels, nil
}
