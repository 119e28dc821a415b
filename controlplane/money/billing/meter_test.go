package billing

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Hours of one meter, as scripts. Times are minutes since the VM was made. `made [reserved]` begins, `use at= vcpus= mib=
// gib=` changes what is used, `pass at=` looks, `prices vcpu= memory= disk=` sets others. What is shown are the bills, and
// up to when the hours are counted.
func TestHours(t *testing.T) {
	datadriven.Walk(t, "testdata/hours", func(t *testing.T, path string) {
		terms := Terms{Prices: prices, Hour: 3600_000}
		var m Meter
		datadriven.RunTest(t, path, func(t *testing.T, q *datadriven.TestData) string {
			var at int64
			var u Use
			q.MaybeScanArgs(t, "at", &at)
			at *= 60_000
			var bills []*Bill
			switch q.Cmd {
			case "made":
				m = Meter{VM: "v", Name: "web"}
				if q.HasArg("reserved") {
					m.Reservation = "r"
				}
			case "prices":
				q.MaybeScanArgs(t, "vcpu", &terms.Prices.VCPUHour)
				q.MaybeScanArgs(t, "memory", &terms.Prices.MemoryGiBHour)
				q.MaybeScanArgs(t, "disk", &terms.Prices.DiskGiBHour)
				return ""
			case "pass":
				if b := m.Pass(at, terms); b != nil {
					bills = append(bills, b)
				}
			case "use":
				var vcpus int
				q.MaybeScanArgs(t, "vcpus", &vcpus)
				u.VCPUs = uint32(vcpus)
				q.MaybeScanArgs(t, "mib", &u.MemoryMiB)
				q.MaybeScanArgs(t, "gib", &u.DiskGiB)
				bills = m.Change(at, u, terms)
			default:
				t.Fatalf("no command %s", q.Cmd)
			}
			return shown(bills, &m)
		})
	})
}

func shown(bills []*Bill, m *Meter) string {
	var out strings.Builder
	for _, b := range bills {
		fmt.Fprintf(&out, "bill %d: %d h from %d at %d", b.Number, b.Hours, minutes(b.From), b.Price)
		if b.More {
			out.WriteString(", the rest")
		}
		if b.Reservation != "" {
			out.WriteString(", reserved")
		}
		fmt.Fprintf(&out, " (%s)\n", b.Use)
	}
	fmt.Fprintf(&out, "until %d peak %d\n", minutes(m.Until), m.Peak)
	return out.String()
}

func minutes(t cloud.Time) int64 { return t / 60_000 }
