package libvirt

import (
	"encoding/xml"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDomainNameIsEscaped(t *testing.T) {
	d := Domain{Name: `a<b>'"&`, UUID: "u", Machine: "pc-q35-7.2", CPUMaximum: true, VCPUs: 1, MemoryMiB: 192,
		Kernel: "/k", Initrd: "/i", Cmdline: "x='1'", Disk: "/d", Base: "/b", Serial: "/s", Ports: 2}
	var got struct {
		Name string `xml:"name"`
		OS   struct {
			Cmdline string `xml:"cmdline"`
		} `xml:"os"`
		Devices struct {
			Disk struct {
				Boot *struct{} `xml:"boot"`
			} `xml:"disk"`
			Controllers []struct {
				Model string `xml:"model,attr"`
			} `xml:"controller"`
		} `xml:"devices"`
	}
	require.NoError(t, xml.Unmarshal([]byte(d.XML()), &got))
	require.Equal(t, d.Name, got.Name)
	require.Equal(t, d.Cmdline, got.OS.Cmdline)
	require.Len(t, got.Devices.Controllers, 3)
	require.Nil(t, got.Devices.Disk.Boot, "the domain must boot the kernel, not the disk")
	d.Kernel = ""
	require.NoError(t, xml.Unmarshal([]byte(d.XML()), &got))
	require.NotNil(t, got.Devices.Disk.Boot)
}
