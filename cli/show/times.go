package show

import (
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// times lists the signed 64-bit fields that are times, in Unix milliseconds, although their names do not end in _at. A
// test writes the decision for every 64-bit field of our services to testdata/fields.txt.
var times = map[protoreflect.FullName]bool{
	"credit.v1.GetStatementRequest.from":        true,
	"credit.v1.GetStatementRequest.to":          true,
	"credit.v1.ListTransactionsRequest.from":    true,
	"credit.v1.ListTransactionsRequest.to":      true,
	"credit.v1.Statement.from":                  true,
	"credit.v1.Statement.to":                    true,
	"identity.v1.AuditRecord.time":              true,
	"identity.v1.ListAuditRecordsRequest.since": true,
	"identity.v1.ListAuditRecordsRequest.until": true,
	"operator.v1.Drain.deadline":                true,
	"operator.v1.Migration.deadline":            true,
	"operator.v1.VmListChange.timestamp":        true,
	"operator.v1.VmTransition.timestamp":        true,
	"vmcontroller.v1.Node.last_heartbeat":       true,
	"vmcontroller.v1.VmEvent.timestamp":         true,
}

// IsTime reports whether a field is a time in Unix milliseconds: a signed 64-bit integer whose name ends in _at, or one
// of times.
func IsTime(fd protoreflect.FieldDescriptor) bool {
	return fd.Kind() == protoreflect.Int64Kind && (strings.HasSuffix(string(fd.Name()), "_at") || times[fd.FullName()])
}
