package cloud

// DeviceChange is a pending change of a running guest's NIC or disk: it was requested, and the host has not reported
// its result yet.
type DeviceChange uint8

const (
	DeviceUnchanged DeviceChange = iota
	DeviceAttaching
	DeviceDetaching
)

// deviceResult is the result of a pending change of a NIC or a disk.
type deviceResult struct {
	ended   bool // the change is done or refused
	stays   bool // the VM's record keeps the device
	refused bool // the host could not make the change
}

// result returns the result of the change c after a host's report. process is true if the guest has a process, and
// attached is true if the process has the device. refusal is the reason why the host could not make the change, or "".
func (c DeviceChange) result(process, attached bool, refusal string) deviceResult {
	switch {
	case c == DeviceUnchanged:
		return deviceResult{stays: true}
	case c == DeviceAttaching && (attached || !process):
		return deviceResult{ended: true, stays: true}
	case c == DeviceDetaching && !attached:
		return deviceResult{ended: true}
	case refusal != "":
		return deviceResult{ended: true, stays: c == DeviceDetaching, refused: true}
	}
	return deviceResult{stays: true} // the host has not finished
}

// hasProcess reports whether the guest has a QEMU process. known is false if the report has no state of the guest.
func (o *Observation) hasProcess() (process, known bool) {
	switch o.Observed {
	case ObservedUnspecified:
		return false, false
	case ObservedLaunching, ObservedRunning, ObservedStopping:
		return true, true
	}
	return false, true
}
