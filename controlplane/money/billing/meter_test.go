package billing

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestHours runs scripts on one meter. Times are minutes since the VM's creation. `made [reserved]` creates the meter
// at time 0, with a reservation if `reserved` is given. `use at= vcpus= mib= gib=` changes the VM's resources at that
// time. `pass at=` counts the hours up to that time. `prices vcpu= memory= disk=` changes the prices. Each command but
// `prices` prints the new bills, the end of the counted hours, and the price of the last counted hour.
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
