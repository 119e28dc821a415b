package machine

import (
	"regexp"
	"strings"
)

var hostPath = regexp.MustCompile(`(^|[\s"'=(])/[^\s"':;,)]*`)

// maxBrief is the largest length of an error text for a tenant, in bytes.
const maxBrief = 300

// brief returns the text of an error for a tenant: one line, at most maxBrief bytes, without paths of the host.
func brief(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	text = hostPath.ReplaceAllString(text, "${1}(file)")
	if len(text) > maxBrief {
		text = strings.ToValidUTF8(text[:maxBrief], "")
	}
	return text
}
