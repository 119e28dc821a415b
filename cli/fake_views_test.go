package main

import (
	"cmp"
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

// fakeViews is the VmViewService of a fakeCloud.
type fakeViews struct {
	operatorv1.UnimplementedVmViewServiceServer
	cloud *fakeCloud
	// scripts holds what each stream of WatchVms or WatchAllVms in turn sends.
	scripts [][]watchedList
	details *operatorv1.GetVmDetailsResponse
}

// watchedList is one step of a stream: a change, a wait, or a status code that ends the stream.
type watchedList struct {
	change *operatorv1.VmListChange
	code   codes.Code
	wait   bool
}

func listScript(t *testing.T, text string) (script []watchedList) {
	for line := range lines(text) {
		var code codes.Code
		switch {
		case line == "WAIT":
			script = append(script, watchedList{wait: true})
		case code.UnmarshalJSON([]byte(`"`+line+`"`)) == nil:
			script = append(script, watchedList{code: code})
		default:
			c := &operatorv1.VmListChange{}
			require.NoError(t, prototext.Unmarshal([]byte(line), c))
			script = append(script, watchedList{change: c})
		}
	}
	return script
}

// ListAllVms lists the VMs for the administrator, all on one page. The only filters that it supports are one on
// node_id and one on id.
func (v *fakeViews) ListAllVms(ctx context.Context, in *operatorv1.ListAllVmsRequest) (*operatorv1.ListAllVmsResponse, error) {
	if bearer(ctx) != adminToken {
		return nil, failed(codes.PermissionDenied, "", "only system:admin may ListAllVms")
	}
	v.cloud.mu.Lock()
	defer v.cloud.mu.Unlock()
	out := &operatorv1.ListAllVmsResponse{}
	node, filtered := strings.CutPrefix(in.GetFilter(), `node_id = "`)
	id, byID := strings.CutPrefix(in.GetFilter(), `id = "`)
	for _, vm := range v.cloud.vms {
		if byID && vm.GetId() != strings.TrimSuffix(id, `"`) {
			continue
		}
		if !filtered || vm.GetNodeId() == strings.TrimSuffix(node, `"`) {
			out.Vms = append(out.Vms, vm)
		}
	}
	return out, nil
}

func (v *fakeViews) WatchVms(_ *operatorv1.WatchVmsRequest, stream grpc.ServerStreamingServer[operatorv1.WatchVmsResponse]) error {
	return v.play(stream.Context(), func(c *operatorv1.VmListChange) error {
		return stream.Send(&operatorv1.WatchVmsResponse{Change: c})
	})
}

func (v *fakeViews) WatchAllVms(_ *operatorv1.WatchAllVmsRequest, stream grpc.ServerStreamingServer[operatorv1.WatchAllVmsResponse]) error {
	return v.play(stream.Context(), func(c *operatorv1.VmListChange) error {
		return stream.Send(&operatorv1.WatchAllVmsResponse{Change: c})
	})
}

func (v *fakeViews) play(ctx context.Context, send func(*operatorv1.VmListChange) error) error {
	v.cloud.mu.Lock()
	var script []watchedList
	if len(v.scripts) > 0 {
		script, v.scripts = v.scripts[0], v.scripts[1:]
	}
	v.cloud.mu.Unlock()
	for _, w := range script {
		switch {
		case w.wait:
			<-ctx.Done()
			return nil
		case w.change == nil:
			return failed(w.code, "", "the stream broke")
		}
		if err := send(w.change); err != nil {
			return err
		}
	}
	return nil
}

func (v *fakeViews) GetVmDetails(_ context.Context, in *operatorv1.GetVmDetailsRequest) (*operatorv1.GetVmDetailsResponse, error) {
	v.cloud.mu.Lock()
	defer v.cloud.mu.Unlock()
	vm, err := v.cloud.vm(in.GetVmId())
	if err != nil {
		return nil, err
	}
	out := &operatorv1.GetVmDetailsResponse{}
	if v.details != nil {
		out = proto.CloneOf(v.details)
	}
	out.Vm = proto.CloneOf(vm)
	out.CpuModel = cmp.Or(out.GetCpuModel(), vm.GetSpec().GetCpu().GetCpuModel())
	return out, nil
}
