PROTOS := $(shell find protos -name '*.proto' | sort)

# gen writes the .pb.go files beside their .proto.
.PHONY: gen
gen:
	@mkdir -p .build/bin
	go build -o .build/bin/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
	PATH="$(CURDIR)/.build/bin:$$PATH" protoc -I protos \
		--go_out=protos --go_opt=paths=source_relative \
		--go-grpc_out=protos --go-grpc_opt=paths=source_relative \
		$(PROTOS:protos/%=%)
