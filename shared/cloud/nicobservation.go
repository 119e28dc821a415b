package cloud

// NICObservation is a host's report about one NIC of a running guest.
type NICObservation struct {
	ID string
	// Attached is true while the guest has the device. A guest keeps a device until it releases it.
	Attached bool
	// Error is why the host could not attach or detach the NIC as desired.
	Error string
}
