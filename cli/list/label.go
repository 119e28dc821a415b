package list

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
)

// Labels holds the values of the flag --label, which selects objects by their labels. Lists and the commands that change
// several objects share the flag, so that a list shows what such a command will change.
type Labels []string

// Add adds the flag to c. objects says what it selects, such as "list only objects".
func (l *Labels) Add(c *cobra.Command, objects string) {
	c.Flags().StringSliceVarP((*[]string)(l), "label", "l", nil, objects+" with this label: KEY=VALUE, or KEY for any value; repeatable")
}

// Filter returns the filter, in the form of AIP-160, for objects that have all the labels. It is empty without labels.
// Filter returns a *session.Usage error for an invalid label.
func (l Labels) Filter() (string, error) {
	var terms []string
	for _, label := range l {
		key, value, has := strings.Cut(label, "=")
		k, v := quote(key), quote(value)
		if key == "" || k == "" || has && v == "" {
			return "", session.Usagef("--label %q: want KEY=VALUE or KEY", label)
		}
		// In a filter, a label that an object does not have is an empty text. The object must not be selected then: a
		// script may write "--label env=$ENV" with a variable that is not set.
		if !has || strings.Trim(value, "*") == "" {
			terms = append(terms, fmt.Sprintf("labels.%s:*", k))
		}
		if has {
			terms = append(terms, fmt.Sprintf("labels.%s = %s", k, v))
		}
	}
	return strings.Join(terms, " AND "), nil
}

// quote returns text as a string of a filter, or "" if it contains both kinds of quotes. Filters have no escapes.
func quote(text string) string {
	for _, q := range []string{`"`, `'`} {
		if !strings.Contains(text, q) {
			return q + text + q
		}
	}
	return ""
}
