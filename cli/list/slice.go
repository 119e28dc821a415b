package list

import (
	"strconv"

	"github.com/trivet-cloud/trivet/cli/session"
)

// Slice returns the page of a list that the API returns as a whole. The token of a page is the number of objects before
// it.
func Slice[T any](all []T, q Query) (page []T, next string, err error) {
	first := 0
	if q.Token != "" {
		if first, err = strconv.Atoi(q.Token); err != nil || first < 0 || first > len(all) {
			return nil, "", session.Usagef("--page-token %q: is not one that this list gave", q.Token)
		}
	}
	end := min(len(all), first+int(q.Size))
	if end < len(all) {
		next = strconv.Itoa(end)
	}
	return all[first:end], next, nil
}
