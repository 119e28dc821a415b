package audit

import (
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Query selects the records that match all of its fields. A field that is empty or 0 matches every record.
type Query struct {
	// Within limits the query to the records of an org (including all its projects) or of one project.
	Within    cloud.Tenant
	Principal string
	// Method is the full name of a gRPC method, or the part after its last slash.
	Method string
	// Outcome is the outcome that a record must have; Refused selects every outcome except OK.
	Outcome string
	// Since and Until are the limits of the records' time, in Unix milliseconds: Since inclusive, Until exclusive. 0
	// means no limit.
	Since, Until cloud.Time
	Size         int32
	Token        string
}

// Refused is a value of Query.Outcome that selects every outcome except OK.
const Refused = "REFUSED"

func (q *Query) matches(r *Record) bool {
	return (q.Within.Org == "" || r.Tenant.Org == q.Within.Org) && (q.Within.Project == "" || r.Tenant.Project == q.Within.Project) &&
		(q.Principal == "" || r.Principal == q.Principal) &&
		(q.Method == "" || isMethod(r.Method, q.Method)) &&
		(q.Outcome == "" || r.Outcome == q.Outcome || q.Outcome == Refused && r.Outcome != OK) &&
		r.At >= q.Since && (q.Until == 0 || r.At < q.Until)
}

// check returns InvalidArgument for a query that can select nothing because of a typing error.
func (q *Query) check() error {
	switch {
	case q.Since < 0 || q.Until < 0:
		return fault.Invalid("since", "since and until are Unix milliseconds, 0 for no bound")
	case q.Outcome != "" && q.Outcome != Refused && q.Outcome != suppressed && !isCode(q.Outcome):
		return fault.Invalid("outcome", "want OK, REFUSED or a gRPC code such as PERMISSION_DENIED, got %s", q.Outcome)
	case q.Method != "" && !slices.ContainsFunc(methods(), func(m string) bool { return isMethod(m, q.Method) }):
		return fault.Invalid("method", "want the name of an RPC, such as CreateVm, got %s", q.Method)
	}
	return nil
}

// isCode reports whether text is the name of a gRPC code, such as NOT_FOUND.
func isCode(text string) bool {
	var c codes.Code
	return c.UnmarshalJSON([]byte(strconv.Quote(text))) == nil
}

// isMethod reports whether text is the full name of a method, or the part after its last slash.
func isMethod(full, text string) bool { return full == text || strings.HasSuffix(full, "/"+text) }

// methods returns the full names of the RPCs of all services in this program.
var methods = sync.OnceValue(func() (all []string) {
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			of := f.Services().Get(i).Methods()
			for j := range of.Len() {
				all = append(all, "/"+string(of.Get(j).Parent().FullName())+"/"+string(of.Get(j).Name()))
			}
		}
		return true
	})
	return all
})
