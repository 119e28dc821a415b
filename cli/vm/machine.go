package vm

import (
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// machineFlags are the flags of `trivet vm create` for the firmware, the TPM, the clock, the CD-ROM drive and the CPUs of
// the host. Most of them are metadata of the VM.
type machineFlags struct {
	firmware, osType, rtc, cdrom, cpuPolicy string
	secureBoot, tpm                         bool
}

func (f *machineFlags) register(p *pflag.FlagSet) {
	p.StringVar(&f.firmware, "firmware", "", "bios or uefi; the default is bios, and uefi with --secure-boot")
	p.BoolVar(&f.secureBoot, "secure-boot", false, "boot only signed boot loaders")
	p.BoolVar(&f.tpm, "tpm", false, "give the VM a TPM 2.0")
	p.StringVar(&f.cdrom, "cdrom", "", "image in the CD-ROM drive, by name or ID; the VM boots from it if no disk boots")
	p.StringVar(&f.osType, "os-type", "", "linux or windows: devices for which the guest has drivers; the default is linux")
	p.StringVar(&f.cpuPolicy, "cpu-policy", "", "shared or dedicated: dedicated CPUs of the host run only this VM; the default is shared")
	p.StringVar(&f.rtc, "rtc", "", "utc or localtime: time of the guest's clock; the default depends on --os-type")
}

// addTo returns the metadata with the values of the flags. It does not change the map itself.
func (f *machineFlags) addTo(metadata map[string]string) (map[string]string, error) {
	out := maps.Clone(metadata)
	if out == nil {
		out = map[string]string{}
	}
	for _, one := range []struct {
		flag, key, value string
		values           []string
	}{
		{"firmware", cloud.FirmwareKey, f.firmware, []string{"bios", "uefi"}},
		{"os-type", cloud.OSTypeKey, f.osType, []string{"linux", "windows"}},
		{"rtc", cloud.RTCKey, f.rtc, []string{"utc", "localtime"}},
		{"cpu-policy", cloud.CPUPolicyKey, f.cpuPolicy, []string{"shared", "dedicated"}},
	} {
		if one.value == "" {
			continue
		}
		if !slices.Contains(one.values, one.value) {
			return nil, session.Usagef("--%s %q: want %s or %s", one.flag, one.value, one.values[0], one.values[1])
		}
		out[one.key] = one.value
	}
	return out, nil
}

// security returns a text for the security part of a spec, or "" if the VM has neither secure boot nor a TPM.
func security(s *vmv1.SecuritySpec) string {
	var words []string
	if s.GetSecureBoot() {
		words = append(words, "secure boot")
	}
	if s.GetTpm() {
		words = append(words, "TPM 2.0")
	}
	return strings.Join(words, ", ")
}

// security returns the security part of a spec, or nil if the VM has neither secure boot nor a TPM.
func (f *machineFlags) security() *vmv1.SecuritySpec {
	if !f.secureBoot && !f.tpm {
		return nil
	}
	return &vmv1.SecuritySpec{SecureBoot: f.secureBoot, Tpm: f.tpm}
}
