package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

const (
	senders  = 16
	pause    = 50 * time.Millisecond
	patience = 15 * time.Second
)

type asked struct {
	Kind       string
	Topic      string
	Body       string
	Tags       string
	Keys       string
	Shard      string
	DelayLevel int `json:"delay_level"`
	Properties map[string]string
	Decision   string
	Messages   []asked
	Many       int
}

// decisions decides as the message is told to, and commits what is asked about.
type decisions struct{}

func (decisions) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	switch message.GetProperty("decision") {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	}
	return primitive.UnknowState
}

func (decisions) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	put(line{
		"checked":    string(message.Body),
		"message_id": message.GetProperty(primitive.PropertyUniqueClientMessageIdKeyIndex),
	})
	return primitive.CommitMessageState
}

func made(what asked, topic string) *primitive.Message {
	message := primitive.NewMessage(topic, []byte(what.Body))
	if what.Tags != "" {
		message.WithTag(what.Tags)
	}
	if what.Keys != "" {
		message.WithKeys([]string{what.Keys})
	}
	if what.DelayLevel != 0 {
		message.WithDelayTimeLevel(what.DelayLevel)
	}
	if what.Shard != "" {
		message.WithShardingKey(what.Shard)
	}
	for name, value := range what.Properties {
		message.WithProperty(name, value)
	}
	return message
}

type clients struct {
	plain        rocketmq.Producer
	transactions rocketmq.TransactionProducer
}

func (c clients) send(what asked) (line, error) {
	limit, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	message := made(what, what.Topic)
	var result *primitive.SendResult
	var err error
	switch what.Kind {
	case "async":
		answered := make(chan error, 1)
		err = c.plain.SendAsync(
			limit,
			func(_ context.Context, answer *primitive.SendResult, failed error) {
				result = answer
				answered <- failed
			},
			message,
		)
		if err == nil {
			err = <-answered
		}
	case "oneway":
		return line{"oneway": true}, c.plain.SendOneWay(limit, message)
	case "batch":
		var batch []*primitive.Message
		for _, item := range what.Messages {
			batch = append(batch, made(item, what.Topic))
		}
		result, err = c.plain.SendSync(limit, batch...)
	case "transaction":
		message.WithProperty("decision", what.Decision)
		var ended *primitive.TransactionSendResult
		if ended, err = c.transactions.SendMessageInTransaction(limit, message); err == nil {
			result = ended.SendResult
		}
	default:
		result, err = c.plain.SendSync(limit, message)
	}
	if err != nil {
		return nil, err
	}
	status := "NOT_OK"
	if result.Status == primitive.SendOK {
		status = "SEND_OK"
	}
	return line{
		"status":     status,
		"message_id": result.MsgID,
		"queue_id":   result.MessageQueue.QueueId,
		"offset":     result.QueueOffset,
	}, nil
}

func (c clients) sendMany(topic string, wanted int) {
	var acknowledged, number atomic.Int64
	var all sync.WaitGroup
	for range senders {
		all.Add(1)
		go func() {
			defer all.Done()
			for acknowledged.Load() < int64(wanted) {
				body := fmt.Sprintf("m%06d", number.Add(1)-1)
				answer, err := c.send(asked{Topic: topic, Body: body, Tags: "F", Keys: body})
				if err == nil && answer["status"] != "SEND_OK" {
					err = fmt.Errorf("status %v", answer["status"])
				}
				if err != nil {
					put(line{"failed": body, "error": err.Error()})
					time.Sleep(pause)
					continue
				}
				acknowledged.Add(1)
				answer["acknowledged"] = body
				put(answer)
			}
		}()
	}
	all.Wait()
	put(line{"done": wanted})
}

func produce(nameServers string) {
	resolver := primitive.NewPassthroughResolver([]string{nameServers})
	plain, err := rocketmq.NewProducer(
		producer.WithNsResolver(resolver),
		producer.WithGroupName("senders"),
		producer.WithInstanceName("plain"),
		producer.WithRetry(2),
		producer.WithQueueSelector(producer.NewHashQueueSelector()),
	)
	check(err)
	check(plain.Start())
	transactions, err := rocketmq.NewTransactionProducer(
		decisions{},
		producer.WithNsResolver(resolver),
		producer.WithGroupName("deciders"),
		producer.WithInstanceName("transactions"),
	)
	check(err)
	check(transactions.Start())
	both := clients{plain, transactions}
	put(line{"ready": true})
	for input := requests(); input.Scan(); {
		var what asked
		check(json.Unmarshal(input.Bytes(), &what))
		if what.Many > 0 {
			both.sendMany(what.Topic, what.Many)
			continue
		}
		answer, err := both.send(what)
		if err != nil {
			answer = line{"error": err.Error()}
		}
		put(answer)
	}
	plain.Shutdown()
	transactions.Shutdown()
}
