package network

import (
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// maxVNI is the greatest VXLAN network identifier, which has 24 bits. 0 is not assigned.
const maxVNI = 1<<24 - 1

var (
	// vnis has the ID of the subnet, NAT gateway or floating IP of each assigned VXLAN network identifier, at
	// vni/<identifier>.
	vnis = store.NewTable[string]("vni")
	// lastVNI has the identifier that was assigned last, at vni-last/system.
	lastVNI = store.NewTable[uint32]("vni-last")
)

func vniPath(n uint32) string { return fmt.Sprintf("%06x", n) }

// assignVNI assigns the next free identifier after the one that was assigned last. user is the ID of the subnet, NAT
// gateway or floating IP that gets the identifier.
func assignVNI(tx *store.Tx, user string) (uint32, error) {
	last, err := lastVNI.Get(tx, "system")
	if err != nil {
		return 0, err
	}
	if last == nil {
		last = new(uint32)
	}
	for range maxVNI {
		*last = *last%maxVNI + 1
		taken, err := vnis.Has(tx, vniPath(*last))
		if err != nil {
			return 0, err
		}
		if !taken {
			lastVNI.Put(tx, last, "system")
			vnis.Put(tx, &user, vniPath(*last))
			return *last, nil
		}
	}
	return 0, fault.New(fault.ResourceExhausted,
		"the cloud has %d subnets, NAT gateways and floating IPs of service IPs, and can have no more", maxVNI)
}

// releaseVNI makes an identifier available again.
func releaseVNI(tx *store.Tx, n uint32) { vnis.Delete(tx, vniPath(n)) }
