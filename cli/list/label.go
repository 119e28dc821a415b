package list

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
)

// Labels holds the values of the flag --label, which selects objects by their labels. Lists and the commands that change
// several objects share the flag, so that a list shows what such a command will change.
type Labels []string

// Add adds the flag to c. objects says what it selects, such as "list only objects".
func (l *Labels) Add(c *cobra.Command, objects string) {
	c.Flags().StringArrayVarP((*[]string)(l), "label", "l", nil, objects+` with these labels: "KEY=VALUE", "KEY!=VALUE", "KEY" for any value, `+
		`"!KEY", "KEY in (A,B)" or "KEY notin (A,B)", separated by commas as in kubectl; repeatable`)
}

// Filter returns the filter, in the form of AIP-160, for objects that fulfil all requirements. It is empty without labels.
// Filter returns a *session.Usage error for an invalid requirement.
func (l Labels) Filter() (string, error) {
	var terms []string
	for _, selector := range l {
		for _, requirement := range splitSelector(selector) {
			term := requirementFilter(strings.TrimSpace(requirement))
			if term == "" {
				return "", session.Usagef("--label %q: want KEY=VALUE, KEY!=VALUE, KEY, !KEY, KEY in (A,B) or KEY notin (A,B)", selector)
			}
			terms = append(terms, term)
		}
	}
	return strings.Join(terms, " AND "), nil
}

// splitSelector splits a selector at the commas that are not between parentheses.
func splitSelector(text string) (all []string) {
	depth, start := 0, 0
	for i, r := range text {
		switch {
		case r == '(':
			depth++
		case r == ')':
			depth--
		case r == ',' && depth == 0:
			all = append(all, text[start:i])
			start = i + 1
		}
	}
	return append(all, text[start:])
}

const labelKey = `([A-Za-z0-9._/-]+)`

var (
	setRequirement    = regexp.MustCompile(`^` + labelKey + `\s+(in|notin)\s*\(([^()]*)\)$`)
	equalRequirement  = regexp.MustCompile(`^` + labelKey + `\s*(==|!=|=)\s*([^=!].*)?$`)
	existsRequirement = regexp.MustCompile(`^(!?)\s*` + labelKey + `$`)
)

// requirementFilter returns the filter for one requirement of a selector, or "" if the requirement is invalid. As in
// kubectl, an object without the label fulfils != and notin.
func requirementFilter(text string) string {
	if m := setRequirement.FindStringSubmatch(text); m != nil {
		var terms []string
		for _, value := range strings.Split(m[3], ",") {
			term := ""
			if value = strings.TrimSpace(value); value != "" {
				term = labelIs(m[1], value)
			}
			if term == "" {
				return ""
			}
			if strings.Contains(term, " AND ") {
				term = "(" + term + ")" // OR binds more strongly than AND
			}
			terms = append(terms, term)
		}
		return not(m[2] == "notin") + "(" + strings.Join(terms, " OR ") + ")"
	}
	if m := existsRequirement.FindStringSubmatch(text); m != nil {
		return not(m[1] != "") + fmt.Sprintf("labels.%s:*", quote(m[2]))
	}
	m := equalRequirement.FindStringSubmatch(text)
	if m == nil {
		return ""
	}
	term := labelIs(m[1], m[3])
	if term == "" || m[2] != "!=" {
		return term
	}
	return not(true) + "(" + term + ")"
}

func not(negative bool) string {
	if negative {
		return "NOT "
	}
	return ""
}

// labelIs returns the filter for objects whose label has a value, or "" if the value cannot be written in a filter.
func labelIs(key, value string) string {
	k, v := quote(key), quote(value)
	if v == "" {
		return ""
	}
	// In a filter, a label that an object does not have is an empty text. The object must not be selected then: a
	// script may write "--label env=$ENV" with a variable that is not set.
	if strings.Trim(value, "*") == "" {
		return fmt.Sprintf("labels.%s:* AND labels.%s = %s", k, k, v)
	}
	return fmt.Sprintf("labels.%s = %s", k, v)
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
